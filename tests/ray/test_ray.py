"""The real Ray counts the cards of a container, and gives each of its workers one of its own.

`make ray` installs Ray in an environment of its own, and runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from npu_agent.core.grant import grant
from npu_agent.core.hardware import CardState
from npu_agent.kubelet.cdi import claim_spec
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.people.commands.cdi import host_spec
from tests.outputs.deviceplugin.helpers import allocate, devices, snapshot, state

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("NPU_AGENT_RAY", ROOT / ".venv-ray")) / "bin" / "python"
STAND_IN = """
def init():
    pass


def list_devices():
    return [object()] * 8  # of the host: the vendor's library counts all of its cards
"""
CARDS = (state("rngd", 1), state("rngd", 4))

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="make ray installs Ray"),
    pytest.mark.timeout(300),
]


def counted(environment: dict[str, str], directory: Path) -> dict[str, Any]:
    (directory / "furiosa_smi_py.py").write_text(STAND_IN, encoding="utf-8")
    ours = ("PATH", "HOME", "TMPDIR")
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("count.py")],
        env={name: os.environ[name] for name in ours if name in os.environ}
        | {"PYTHONPATH": str(directory), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment_of(cards: tuple[CardState, ...], cores: int | None, ids: list[str]) -> Any:
    """What a container with these devices has, whichever way it got them."""
    listed = {device.id: device for device in devices(*cards, cores=cores)}
    (answer,) = wire.AllocateResponse().parse(allocate([ids], listed, "r")).container_responses
    claim = json.loads(claim_spec("k/c", "u", {"npu": grant(listed[id_] for id_ in ids)}))
    by_claim = claim["devices"][0]["containerEdits"]["env"]
    assert by_claim == [f"{name}={value}" for name, value in answer.envs.items()]
    return answer.envs


@pytest.mark.parametrize(
    ("cores", "ids", "workers"),
    [
        (None, ["RNGD-1"], ["npu:1"]),
        (None, ["RNGD-1", "RNGD-4"], ["npu:1", "npu:4"]),
        # Ray knows whole cards only: docs/limitations.md.
        (4, ["RNGD-4_cores_4-7"], ["npu:4"]),
    ],
    ids=["one card", "two cards", "half a card"],
)
def test_ray_counts_cards_and_each_worker_has_its_own(
    cores: int | None, ids: list[str], workers: list[str], tmp_path: Path
) -> None:
    found = counted(environment_of(CARDS, cores, ids), tmp_path)
    assert found == {"count": len(workers), "workers": workers}


def test_ray_counts_all_cards_of_a_host_without_a_kubelet(tmp_path: Path) -> None:
    spec = json.loads(host_spec(snapshot(*CARDS)).content or b"")
    (every,) = (entry for entry in spec["devices"] if entry["name"] == "all")
    environment = dict(item.split("=", 1) for item in every["containerEdits"]["env"])
    assert counted(environment, tmp_path)["workers"] == ["npu:1", "npu:4"]
