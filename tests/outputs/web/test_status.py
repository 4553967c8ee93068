"""/status.json."""

import json
import time
from dataclasses import replace
from datetime import datetime

from npu_agent.outputs.web.status import as_json
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.web.helpers import Scene, night


def test_the_json_is_made_of_plain_values_with_the_keys_that_are_promised() -> None:
    found = json.loads(json.dumps(as_json(night().state())))
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
    found = as_json(replace(Scene(), cards=(state(),), node=None).state())
    assert found["cards"][0]["reading"] is None
    assert found["labels"] is None
    assert found["node"] is None
