import json
import time
from dataclasses import replace
from datetime import datetime

import msgspec

from npu_agent.config.schema import Config, DisabledDevice
from npu_agent.core.hardware import CoreRange, Oddity, State
from npu_agent.core.ledger import Assignment
from npu_agent.kubelet.podresources import Holdings
from npu_agent.outputs.deviceplugin.session import Phase
from npu_agent.outputs.labels.state import LabelState
from npu_agent.outputs.web.status import as_json
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.web.helpers import Scene, fenced, held, night, read


def texts(scene: Scene) -> list[str]:
    return [note.text for note in scene.status().problems]


def notes(scene: Scene) -> list[str]:
    return [note.text for note in scene.status().notes]


def test_all_is_well() -> None:
    scene = Scene(cards=(read(state()),))
    assert texts(scene) == notes(scene) == []


def test_who_holds_which_cores_of_which_card() -> None:
    card = state()
    pods = (held(card, "b", CoreRange(1, 1)), held(card, "a", CoreRange(0, 0)))
    scene = Scene(cards=(card, state(index=1)), holdings=Holdings(assignments=pods))
    first, second = scene.status().cards
    assert [(one.pod, str(one.cores)) for one in first.holders] == [("a", "0"), ("b", "1")]
    assert second.holders == ()


def test_devices_of_others_are_none_of_our_business() -> None:
    other = Assignment("default", "gpu-pod", "main", "example.com/gpu", "GPU-1")
    scene = Scene(cards=(state(),), holdings=Holdings(assignments=(other,)))
    assert texts(scene) == []
    assert scene.status().missing == ()


def test_a_sick_card_is_a_problem_and_says_whose() -> None:
    card = fenced(state(), "alive says 0", 60)
    scene = Scene(cards=(card,), holdings=Holdings(assignments=(held(card, "yolo"),)))
    assert texts(scene) == ["npu0 is unhealthy: alive says 0; in use by default/yolo"]
    (resource,) = scene.status().resources
    assert (resource.offered, resource.healthy, resource.withheld) == (1, 0, ())


def test_a_card_that_went_from_under_a_pod_is_a_problem() -> None:
    scene = Scene(holdings=Holdings(assignments=(held(state(), "yolo"),)))
    assert texts(scene) == ["default/yolo holds WARBOY-0, whose card is not there any more"]


def test_figures_that_do_not_come_any_more_are_a_problem() -> None:
    """A panel that shows old values as if they were new is worse than none."""
    fresh, old = read(state(), age=9), read(state(index=1), age=16)
    scene = Scene(cards=(fresh, old))
    assert [card.late for card in scene.status().cards] == [False, True]
    assert texts(scene) == ["npu1: the figures are old, and no new ones come"]
    read_at = scene.status().cards[1].read_at
    assert read_at is not None
    assert 15 < time.time() - read_at < 60


def test_readings_are_as_old_as_the_config_wants_them() -> None:
    slow = Config(metrics=msgspec.structs.replace(Config().metrics, interval=60.0))
    scene = Scene(cards=(read(state(), age=100),))
    scene.config = msgspec.structs.replace(scene.config, config=slow)
    assert texts(scene) == []


def test_trouble_of_the_agent_is_a_problem_and_told_once() -> None:
    scene = Scene(cards=(state(),), phase=Phase.REGISTERING, reason="kubelet.sock is missing")
    scene.config = msgspec.structs.replace(
        scene.config, error="c.yaml:1:1: bad\nc.yaml:2:1: worse", waiting=("pluginDir",)
    )
    scene.holdings = Holdings(error="the socket is missing")
    scene.labels = LabelState(output="api", labels={"a": "b"}, error="403: give the role patch")
    scene.odd = (Oddity("/sys/x", "Permission denied", unread=True), Oddity("/sys/y", "FPGA"))
    assert texts(scene) == [
        "beta.furiosa.ai/npu: registering again: kubelet.sock is missing",
        "the config file is refused, the last good one stays in force: c.yaml:1:1: bad",
        "who holds what is not known: the socket is missing",
        "the labels are not in place: 403: give the role patch",
        "/sys/x cannot be read: Permission denied",
    ]
    assert notes(scene) == ["waits for a restart of the agent: pluginDir"]


def test_what_is_out_of_the_ordinary_is_noted() -> None:
    unknown = state(health=State.UNKNOWN, reason="the driver does not say")
    unlisted = state(index=1, missing=("pe1", "pe0-1"))
    scene = Scene(cards=(unknown, unlisted, state(index=2)), phase=Phase.STANDBY, reason="by 7")
    disabled = (DisabledDevice(dev_name="NPU2"), DisabledDevice(dev_name="npu0", node_name="else"))
    scene.config = msgspec.structs.replace(scene.config, config=Config(disabled_devices=disabled))
    scene.labels = LabelState(output="nfd", labels={"a": "b"})
    assert texts(scene) == []
    assert notes(scene) == [
        "npu0: its health is unknown: the driver does not say",
        "npu2 is not offered: disabled in the config",
        "npu1 is held back: no device node for core 1: /dev/npu1pe1 is missing",
        "the labels are not in place yet",
        "beta.furiosa.ai/npu stands by: by 7",
    ]


def test_the_json_is_made_of_plain_values_with_the_keys_that_are_promised() -> None:
    found = json.loads(json.dumps(as_json(night().status())))
    assert set(found) == {
        *("node", "version", "started_at", "now", "ready", "unready", "problems", "notes"),
        *("cards", "not_served", "assignments", "resources", "config", "labels"),
    }
    card = found["cards"][2]
    assert set(card) == {
        *("id", "name", "family", "product", "uuid", "serial", "pci_bus_id", "numa_node"),
        *("driver_version", "firmware_version", "core_count", "disabled", "health", "reading"),
        "holders",
    }
    assert card["health"]["state"] == "unhealthy"
    since = datetime.fromisoformat(card["health"]["since"])
    assert since.utcoffset() is not None
    assert 700 < time.time() - since.timestamp() < 900
    assert card["reading"]["late"] is True
    assert card["reading"]["errors"] == {"pcie_post_error": 17}
    assert [holder["cores"] for holder in card["holders"]] == ["0-3", "4-7"]
    assert found["cards"][0]["holders"][0]["cores"] is None
    assert found["cards"][0]["reading"]["temperature"] == 44.0
    assert found["ready"] is False
    assert "did you mean" in found["config"]["error"]
    assert found["labels"]["labels"]["beta.furiosa.ai/npu.count"] == "8"


def test_the_json_of_little_is_whole_too() -> None:
    found = as_json(replace(Scene(), cards=(state(),), node=None).status())
    assert found["cards"][0]["reading"] is None
    assert found["labels"] is None
    assert found["node"] is None
