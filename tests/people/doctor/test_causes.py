"""Which lines are folded as consequences of others, and which never are."""

from __future__ import annotations

import pytest

from npu_agent.people.doctor.causes import CAUSES, with_causes
from npu_agent.people.doctor.check import Check, State

WRONG, UNKNOWN, NOTE, OK = State.WRONG, State.UNKNOWN, State.NOTE, State.OK


def followed(**states: State) -> dict[str, str]:
    """The lines that follow from others, with these; ``_`` stands for a space."""
    checks = with_causes(Check(name.replace("_", " "), state, "") for name, state in states.items())
    return {one.name: one.follows for one in checks if one.follows}


@pytest.mark.parametrize("state", [WRONG, UNKNOWN, NOTE])
def test_what_is_wrong_explains_what_comes_behind_it(state: State) -> None:
    lines = {"plugin directory": WRONG, "kubelet.sock": state, "pod-resources": state}
    assert followed(**lines) == dict.fromkeys(("kubelet.sock", "pod-resources"), "plugin directory")


def test_what_is_well_follows_from_nothing_and_explains_nothing() -> None:
    assert followed(**{"kubelet.sock": WRONG, "pod-resources": OK, "readiness": State.UNUSED}) == {}
    assert followed(**{"kubelet.sock": OK, "pod-resources": WRONG}) == {}
    assert followed(**{"kubelet.sock": NOTE, "pod-resources": WRONG}) == {}


def test_what_could_not_be_seen_explains_only_what_could_not_be_seen_either() -> None:
    lines = {"API server": UNKNOWN, "Node": UNKNOWN, "rights": WRONG}
    assert followed(**lines) == {"Node": "API server"}


def test_a_line_for_each_card_or_resource_has_the_causes_of_its_kind() -> None:
    lines = {"/dev": WRONG, "card npu0": WRONG, "cards": WRONG, "resource a.b/c": WRONG}
    assert followed(**lines) == {"card npu0": "/dev"}
    lines = {"resource a.b/c": WRONG, "allocatable a.b/c": WRONG}
    assert followed(**lines) == {"allocatable a.b/c": "resource a.b/c"}
    lines = {"API server": WRONG, "rights": WRONG, "DRA slices of x": UNKNOWN}
    assert followed(**lines) == dict.fromkeys(("rights", "DRA slices of x"), "API server")


def test_there_is_always_something_to_fix() -> None:
    """Nothing follows from itself, by whatever way: what is wrong would be folded altogether."""

    def causes(name: str, seen: tuple[str, ...] = ()) -> None:
        assert name not in seen, seen
        for cause in CAUSES.get(name, ()):
            causes(cause, (*seen, name))

    for name in CAUSES:
        causes(name)
