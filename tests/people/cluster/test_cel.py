"""Selectors: what is compared as Kubernetes compares it, and what cannot be judged here."""

from __future__ import annotations

import resource
import sys
from typing import Any

import pytest

from npu_agent.kube.objects import SliceDevice
from npu_agent.people.cluster import cel

OWN = 'device.attributes["a.b"]'
DEVICE = SliceDevice(
    "npu0",
    attributes={"cores": {"int": 8}, "c.d/parts": {"ints": [1]}},
    capacity={"memory": {"value": "2Ki"}},
)
MANY_STEPS = "".join(f"{[*range(10)]}.all(x{n}, " for n in range(5)) + f"{OWN}.cores > x0)))))"


@pytest.mark.parametrize(
    ("expression", "meets"),
    [
        ('device.driver == "a.b"', True),
        (f"{OWN}.cores == 8 && {OWN}.?speed.orValue(0) > 1", False),
        ('"speed" in device.attributes["no.such.domain"]', False),
        ('device.capacity["a.b"].memory.compareTo(quantity("2048")) == 0', True),
        ('device.capacity["a.b"].memory.isLessThan(quantity("2M"))', True),
        ("device.allowMultipleAllocations", False),
    ],
)
def test_which_devices_meet_a_selector(expression: str, meets: bool) -> None:
    assert cel.matches(expression, DEVICE, "a.b") is meets


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        (f"{OWN}.speed > 1", "^Key not found in map"),
        (f"{OWN}.cores", "its value is not a bool"),
        (f'{OWN}.cores > 1 && semver("1.0") == semver("1.0")', "'1.0' is not a version"),
    ],
)
def test_a_selector_that_fails_on_a_device(expression: str, error: str) -> None:
    with pytest.raises(cel.CelError, match=error):
        cel.matches(expression, DEVICE, "a.b")


@pytest.mark.parametrize(
    ("fields", "expression", "meets"),
    [
        ({"attributes": {"x": {}, "cores": {"int": 8}}}, f"{OWN}.cores == 8", True),
        ({"attributes": {"x": {}, "y": {"int": 1, "bool": True}}}, "true", True),
        ({"attributes": {"x": {"int": 2**70}}}, f"{OWN}.x == 8", None),
        ({"attributes": {"x": {"version": 5}}}, f"{OWN}.x == 8", None),
        ({"attributes": {"x": {"version": "one"}}}, "true", None),
        ({"capacity": {"x": {}}}, "true", None),
        ({"capacity": {"x": {"value": "much"}}}, "true", None),
        ({"capacity": {"x": {"value": 5}}}, "true", None),
    ],
)
def test_an_odd_device_fails_alone(
    fields: dict[str, Any], expression: str, meets: bool | None
) -> None:
    device = SliceDevice("npu0", **fields)
    if meets is None:
        with pytest.raises(cel.CelError, match=r"^the device has an odd|out of range"):
            cel.matches(expression, device, "a.b")
    else:
        assert cel.matches(expression, device, "a.b") is meets


def doubled(times: int) -> str:
    """A text of 16 bytes that is doubled so often."""
    inner = f"t{times}.size() > 0"
    for at in range(times, 0, -1):
        inner = f"cel.bind(t{at}, t{at - 1} + t{at - 1}, {inner})"
    return f"cel.bind(t0, '{'x' * 16}', {inner})"


def test_a_few_words_that_grow_to_gigabytes_are_not_judged() -> None:
    """Claims are other people's, and the person's machine is not."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    assert cel.matches(doubled(4), DEVICE, "a.b")
    with (
        pytest.raises(cel.CannotJudgeError, match="it takes more than 256 MiB"),
        cel.limited_memory(),
    ):
        cel.matches(doubled(28), DEVICE, "a.b")
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert cel.matches(doubled(4), DEVICE, "a.b")


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


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("nonsense(", "nonsense"),
        ('quantity("1").isInteger()', "undeclared reference to 'isInteger'"),
        ("device.attributes.size() > 0", "it uses a map of domains as a whole"),
        ('1 in device.attributes["c.d"].parts', "it reads attribute c.d/parts, which has type"),
        (MANY_STEPS, "^Iteration budget exceeded"),
    ],
)
def test_an_expression_that_cannot_be_judged_is_named(expression: str, why: str) -> None:
    with pytest.raises(cel.CannotJudgeError, match=why):
        cel.matches(expression, DEVICE, "a.b")


def test_without_cel_the_remedy_is_that_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    cel._environment.cache_clear()
    with pytest.raises(cel.CannotJudgeError, match=r"`pipx install '\.\[kubectl\]'` in a clone"):
        cel.matches("true && true", DEVICE, "a.b")
