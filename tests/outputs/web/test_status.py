"""/status.json as a whole, in a golden file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent.core.state import ConditionState, SlicesState
from npu_agent.outputs.web.status import as_json
from tests.golden import golden
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.helpers import claim
from tests.outputs.web.helpers import Scene, driver, night, stopped


def scene() -> Scene:
    """A night with a driver of DRA: a claim on a card, on one that is gone, and to look at one."""
    found = night()
    slices = SlicesState(dropped=("devices.taints",), trouble="no: do")
    shared = claim("shared", found.cards[0], state(uuid="gone"), pods=("a", "b"))
    admin = replace(shared.devices[0], request="look", admin=True)
    shared = replace(shared, devices=(*shared.devices, admin))
    return replace(
        found,
        cards=tuple(found.cards[at] for at in (0, 2, 5)),
        dra=(driver(shared, slices=slices, reason="why"),),
    )


def test_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(monkeypatch)
    condition = ConditionState(type="a/Ready", status=True, reason="NPUsReady", message="8 of 8")
    found = json.dumps(as_json(replace(scene().state(), condition=condition)), indent=2) + "\n"
    assert found == golden(Path(__file__).parent / "golden/status.json", found)


def test_the_json_of_little_is_whole_too() -> None:
    found = as_json(replace(Scene(), cards=(state(),), node=None).state())
    assert found["cards"][0]["reading"] is None
    assert found["labels"] is None
    assert found["condition"] is None
    assert found["node"] is None
