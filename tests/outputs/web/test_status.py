"""/status.json."""

import json
import time
from dataclasses import replace
from datetime import datetime

import pytest

from npu_agent.core.state import SlicesState
from npu_agent.core.trouble import Trouble
from npu_agent.outputs.web.status import as_json
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.helpers import DRIVER, claim
from tests.outputs.web.helpers import Scene, driver, night


def test_the_json_is_made_of_plain_values_with_the_keys_that_are_promised() -> None:
    found = json.loads(json.dumps(as_json(night().state())))
    assert set(found) == {
        *("node", "version", "started_at", "now", "ready", "unready", "problems", "notes"),
        *("cards", "not_served", "assignments", "resources", "dra", "config", "labels"),
        *("gone", "timeline"),
    }
    card = found["cards"][2]
    assert set(card) == {
        *("id", "name", "family", "product", "uuid", "serial", "pci_bus_id", "numa_node"),
        *("driver_version", "firmware_version", "core_count", "disabled", "moving_to"),
        *("health", "reading"),
        "holders",
    }
    assert card["health"]["state"] == "unhealthy"
    assert (card["health"]["reason"], card["health"]["cause"]) == ("device_state says 0", "dead")
    assert found["cards"][0]["health"]["cause"] is None
    since = datetime.fromisoformat(card["health"]["since"])
    assert since.utcoffset() is not None
    assert 700 < time.time() - since.timestamp() < 900
    for ago, at in (
        (266_020, found["started_at"]),
        (5_400, found["config"]["loaded_at"]),
        (266_000, found["labels"]["applied_at"]),
        (21_000, found["gone"][0]["since"]),
        (85_000, found["timeline"][-1]["at"]),
    ):
        assert time.time() - datetime.fromisoformat(at).timestamp() == pytest.approx(ago, abs=60)
    assert card["reading"]["late"] is True
    assert card["reading"]["errors"] == {"pcie_post_error": 17}
    assert [holder["cores"] for holder in card["holders"]] == ["0-3", "4-7"]
    assert found["cards"][0]["holders"][0]["cores"] is None
    assert found["cards"][0]["reading"]["temperature"] == 44.0
    holder = found["cards"][0]["holders"][0]
    assert set(holder) == {
        *("namespace", "pod", "container", "resource", "device", "claim", "cores")
    }
    assert holder["claim"] is None
    assert found["ready"] is False
    assert "did you mean" in found["config"]["error"]
    assert found["labels"]["labels"]["beta.furiosa.ai/npu.count"] == "8"


def test_what_happened_and_what_to_do() -> None:
    found = json.loads(json.dumps(as_json(night().state())))
    for note in (*found["problems"], *found["notes"]):
        assert set(note) == {"subject", "text", "card", "remedy", "runbook"}
    assert found["problems"][0]["runbook"] == "npucardunhealthy"
    (gone,) = found["gone"]
    assert set(gone) == {"id", "name", "family", "product", "since"}
    assert (gone["id"], gone["name"]) == ("GONE", "npu8")
    latest = found["timeline"][0]
    assert set(latest) == {"at", "first", "count", "subject", "tone", "card", "text"}
    assert (latest["subject"], latest["tone"], latest["count"]) == ("card", "bad", 1)
    times = [datetime.fromisoformat(one["at"]) for one in found["timeline"]]
    assert times == sorted(times, reverse=True)


def test_the_json_of_little_is_whole_too() -> None:
    found = as_json(replace(Scene(), cards=(state(),), node=None).state())
    assert found["cards"][0]["reading"] is None
    assert found["labels"] is None
    assert found["node"] is None


def test_drivers_and_their_claims() -> None:
    one, two, gone = state(uuid="A"), state(index=1, uuid="B"), state(index=2, uuid="C")
    slices = SlicesState(
        published=False,
        generation=7,
        slices=1,
        devices=2,
        writes=9,
        dropped=("devices.taints",),
        trouble=Trouble(what="no", remedy="do"),
    )
    shared = claim("shared", one, gone, pods=("a", "b"))
    admin = replace(shared.devices[0], request="look", admin=True)
    shared = replace(shared, devices=(*shared.devices, admin))
    found = json.loads(
        json.dumps(
            as_json(
                Scene(cards=(one, two), dra=(driver(shared, slices=slices, reason="why"),)).state()
            )
        )
    )
    assert found["dra"] == [
        {
            "driver": DRIVER,
            "phase": "registered",
            "reason": "why",
            "registrations": 1,
            "offered": 0,
            "untainted": 0,
            "slices": {
                "published": False,
                "generation": 7,
                "slices": 1,
                "devices": 2,
                "incomplete": False,
                "trouble": "no: do",
                "dropped": ["devices.taints"],
                "writes": 9,
            },
            "claims": [
                {
                    "namespace": "ml",
                    "name": "shared",
                    "uid": "uid-shared",
                    "pods": ["a", "b"],
                    "devices": [
                        {
                            "request": request,
                            "device": shared.devices[number].device,
                            "card": card,
                            "cores": None,
                            "admin": request == "look",
                        }
                        for number, (request, card) in enumerate(
                            [("npu", one.id), ("npu", None), ("look", one.id)]
                        )
                    ],
                }
            ],
        }
    ]
    holders = found["cards"][0]["holders"]
    assert [(one["pod"], one["container"], one["claim"]) for one in holders] == [
        ("a", None, "shared"),
        ("b", None, "shared"),
    ]
    assert found["cards"][1]["holders"] == []
