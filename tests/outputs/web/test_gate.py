"""Which connections are let in: bounds of what is open and of how fast they come."""

from dataclasses import replace

import pytest

from npu_agent.outputs.web import gate
from npu_agent.outputs.web.gate import Bounds, Gate

BOUNDS = Bounds(most=10, most_each=4, rate=16.0, rate_each=4.0, seconds=2.0, silence=1.0)


def let_in(gate: Gate, address: str, times: int, now: float = 0.0) -> int:
    """How many of so many that come at the same time, and leave immediately."""
    count = 0
    for _ in range(times):
        if gate.enter(address, now):
            gate.leave(address)
            count += 1
    return count


def test_an_address_has_so_many_open_and_gets_new_ones_as_others_end() -> None:
    gate = Gate(BOUNDS)
    assert [gate.enter("a", 0.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert +gate.refused == {"address_open": 2}
    assert gate.enter("b", 0.0)
    gate.leave("a")
    assert gate.enter("a", 0.0)
    assert not gate.enter("a", 0.0)


def test_all_together_have_so_many_open() -> None:
    gate = Gate(BOUNDS)
    assert all(gate.enter(f"address {at}", 0.0) for at in range(10))
    assert not gate.enter("another", 0.0)
    assert +gate.refused == {"open": 1}
    gate.leave("address 3")
    assert gate.enter("another", 0.0)


def test_an_address_that_opens_and_closes_is_held_to_its_rate_and_others_are_not() -> None:
    gate = Gate(BOUNDS)
    assert let_in(gate, "a", 1000) == 9  # 2 seconds' worth, and the one that uses them up
    assert +gate.refused == {"address_rate": 991}
    assert let_in(gate, "b", 5) == 5
    assert let_in(gate, "a", 1000, now=1.0) == 4
    assert let_in(gate, "a", 1000, now=100.0) == 9  # what was not used is not saved up


def test_many_addresses_are_held_to_a_rate_together() -> None:
    gate = Gate(BOUNDS)
    assert sum(let_in(gate, f"address {at}", 1) for at in range(1000)) == 33
    assert +gate.refused == {"rate": 967}
    assert let_in(gate, "late", 1, now=1.0) == 1


def test_who_is_refused_pays_nothing_for_it() -> None:
    gate = Gate(BOUNDS)
    for at in range(100):
        let_in(gate, "a", 100, now=at / 100)
    assert let_in(gate, "a", 100, now=3.0) == 9


def test_what_is_remembered_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_ADDRESSES", 3)
    ours = Gate(replace(BOUNDS, rate=1e6))
    for at in range(100):
        assert let_in(ours, f"address {at}", 1) == 1
    assert len(ours._pace._each) == 3
    assert not ours._open
