"""Selectors: what of a device an answer depends on."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from npu_agent.kube.objects import SliceDevice
from npu_agent.people.cluster import cel

OWN = 'device.attributes["a.b"]'


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('device.driver == "a.b"', []),
        (f"{OWN}.cores > 2 && {OWN}.?speed.orValue(0) > 1", ["cores", "speed"]),
        (f'"speed" in {OWN} && {OWN}["speed"] > 1', ["speed", "speed"]),
        (f"'speed' in {OWN} && {OWN}[?'x y'].hasValue()", ["speed", "x y"]),
        (f'"x" in {OWN}.kind', ["kind"]),
        ('has(device.capacity["a.b"].memory)', ["memory"]),
    ],
)
def test_what_a_selector_reads(expression: str, names: list[str]) -> None:
    wanted = [each for name in names for each in (f"a.b/{name}", name)]
    assert sorted(cel._read(expression, "a.b") or ()) == sorted(wanted)
    assert set(cel._read(expression, "c.d") or ()) == {f"a.b/{name}" for name in names}


@pytest.mark.parametrize(
    "expression",
    [
        f"cel.bind(own, {OWN}, own.cores == 8)",
        f'{OWN}["co" + "res"] == 8',
        f'{OWN}.exists(name, name == "cores")',
        f"size({OWN}) == 2",
        f'"cores" in {OWN} && {OWN}.size() > 1',
    ],
)
def test_a_selector_that_may_read_all(expression: str) -> None:
    assert cel._read(expression, "a.b") is None


def test_devices_that_differ_in_what_is_not_read_are_asked_once() -> None:
    cel._matches.cache_clear()
    for serial in ("a", "b", "c"):
        attributes: dict[str, Any] = {"cores": {"int": 8}, "serial": {"string": serial}}
        assert cel.matches(f"{OWN}.cores == 8", SliceDevice("npu0", attributes=attributes), "a.b")
    assert cel._matches.cache_info().misses == 1


def test_an_attribute_that_a_device_lacks_fails() -> None:
    with pytest.raises(cel.CelError, match="speed"):
        cel.matches(
            f"{OWN}.speed > 1", SliceDevice("npu0", attributes={"cores": {"int": 8}}), "a.b"
        )


def test_a_quantity_is_an_integer_or_not() -> None:
    device = SliceDevice("npu0", capacity={"memory": {"value": "2Ki"}, "share": {"value": "500m"}})
    own = 'device.capacity["a.b"]'
    assert cel.matches(f"{own}.memory.asInteger() == 2048", device, "a.b")
    assert cel.matches(f"!{own}.share.isInteger()", device, "a.b")
    with pytest.raises(cel.CelError, match="1/2 is not an integer"):
        cel.matches(f"{own}.share.asInteger() == 0", device, "a.b")


def test_versions_are_ordered_as_semver_orders_them() -> None:
    """The example of semver.org, 2.0.0, item 11."""
    versions = "1.0.0-alpha 1.0.0-alpha.1 1.0.0-alpha.beta 1.0.0-beta 1.0.0-beta.2 1.0.0-beta.11"
    ordered = [*versions.split(), "1.0.0-rc.1", "1.0.0", "1.0.2", "1.0.10"]
    for at, version in enumerate(ordered):
        device = SliceDevice("npu0", attributes={"driver": {"version": version}})
        for place, other in enumerate(ordered):
            sign = (at > place) - (at < place)
            compared = f'{OWN}.driver.compareTo(semver("{other}")) == {sign}'
            assert cel.matches(compared, device, "a.b")
    same = SliceDevice("npu0", attributes={"driver": {"version": "1.0.0+one"}})
    assert cel.matches(f'{OWN}.driver.compareTo(semver("1.0.0+two")) == 0', same, "a.b")


DEVICE = SliceDevice("npu0", attributes={"cores": {"int": 8}})
HALF = SliceDevice("npu1", attributes={"cores": {"int": 4}})
NONE = SliceDevice("npu2")
MANY_STEPS = "".join(f"{[*range(10)]}.all(x{n}, " for n in range(5)) + f"{OWN}.cores > x0)))))"
DOUBLED = "".join(f"cel.bind(x{n + 1}, x{n} + x{n}, " for n in range(24))
MUCH_MEMORY = f'cel.bind(x0, "{"x" * 10_000}", {DOUBLED}size(x24) > 0{")" * 25}'


def test_devices_are_judged_in_their_order_and_the_first_failure_is_kept() -> None:
    judged = cel.judge(f"{OWN}.cores == 8", [("a.b", one) for one in (HALF, DEVICE, NONE)])
    assert judged.met == (False, True, None)
    assert "cores" in judged.error


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("nonsense(", "nonsense"),
        ("device.attributes.size() > 0", "it uses a map of domains as a whole"),
        (MANY_STEPS, "Iteration budget exceeded"),
        (MUCH_MEMORY, r"ended early|more than 1 s"),
    ],
)
def test_what_cannot_be_judged_is_said(expression: str, why: str) -> None:
    with pytest.raises(cel.CannotJudgeError, match=why):
        cel.judge(expression, [("a.b", DEVICE)])


def test_without_cel_the_remedy_is_that_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    cel._environment.cache_clear()
    with pytest.raises(cel.CannotJudgeError, match=r"`pipx install '\.\[kubectl\]'` in a clone"):
        cel.judge("true", [("a.b", DEVICE)])


def test_one_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cel, "_SECONDS", 0.05)
    monkeypatch.setattr(cel, "matches", lambda *_: time.sleep(60))
    with pytest.raises(cel.CannotJudgeError, match=r"more than 0\.05 s"):
        cel.judge("true", [("a.b", DEVICE)])
