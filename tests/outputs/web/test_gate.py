"""Which connections are let in: bounds of what is open and of how fast they come."""

from dataclasses import replace

import pytest

from npu_agent.outputs.web import gate
from npu_agent.outputs.web.gate import Bounds, Gate

BOUNDS = Bounds(most=10, most_each=4, rate=16.0, rate_each=4.0, seconds=2.0, silence=1.0)


def enter(gate: Gate, address: str, now: float, ended: list[str | None] | None = None) -> bool:
    """Whether a new one is taken; `ended` is of which address one was to end for it."""

    def make_room(of: str | None) -> None:
        assert ended is not None
        ended.append(of)
        gate.leave(of or next(iter(gate._open)))

    return gate.enter(address, now, make_room)


def let_in(gate: Gate, address: str, times: int, now: float = 0.0) -> int:
    """How many of so many that come at the same time, and leave immediately."""
    count = 0
    for _ in range(times):
        if enter(gate, address, now):
            gate.leave(address)
            count += 1
    return count


def test_of_an_address_beyond_its_bound_one_ends_for_each_new_one() -> None:
    gate = Gate(BOUNDS)
    ended: list[str | None] = []
    assert all(enter(gate, "a", 0.0, ended) for _ in range(6))
    assert enter(gate, "b", 0.0, ended)
    assert ended == ["a"] * 2
    assert +gate.refused == {"address_open": 2}
    assert gate._open == {"a": 4, "b": 1}


def test_of_all_beyond_their_bound_one_ends_for_each_new_one() -> None:
    gate = Gate(BOUNDS)
    ended: list[str | None] = []
    assert all(enter(gate, f"address {at % 4}", 0.0, ended) for at in range(10))
    assert ended == []
    assert all(enter(gate, name, 0.0, ended) for name in ("another", "a third"))
    assert ended == [None] * 2
    assert +gate.refused == {"open": 2}
    assert gate._open.total() == 10


def test_none_ends_for_one_that_comes_too_fast() -> None:
    gate = Gate(replace(BOUNDS, rate_each=1.0))
    ended: list[str | None] = []
    assert [enter(gate, "a", 0.0, ended) for _ in range(6)] == [True] * 3 + [False] * 3
    assert ended == []


def test_an_address_that_opens_and_closes_is_held_to_its_rate_and_others_are_not() -> None:
    gate = Gate(BOUNDS)
    assert let_in(gate, "a", 1000) == 9  # 2 seconds' worth, and the one that uses them up
    assert +gate.refused == {"address_rate": 991}
    assert let_in(gate, "b", 5) == 5
    assert let_in(gate, "a", 1000, now=1.0) == 4
    assert let_in(gate, "a", 1000, now=100.0) == 9  # what was not used is not saved up


def test_many_addresses_are_held_to_a_rate_together() -> None:
    gate = Gate(BOUNDS)
    assert sum(let_in(gate, f"address {at}", 1) for at in range(1000)) == 65
    assert +gate.refused == {"rate": 935}
    assert let_in(gate, "late", 1, now=1.0) == 1


def test_who_comes_seldom_is_let_in_when_others_use_up_the_rate_of_all() -> None:
    gate = Gate(BOUNDS)
    for second in range(10):
        for address in range(10):
            let_in(gate, f"address {address}", 100, now=float(second))
        assert let_in(gate, "seldom", 2, now=float(second)) == 1
    assert gate.refused["rate"] > 10


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
