"""The commands of the status page, typed as they stand by a person who has kubectl."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.node import Node
from tests.terminal import terminal

pytestmark = pytest.mark.one_kubelet
CONFIG: dict[str, Any] = {"metrics": {"interval": 1}}


@pytest.fixture(autouse=True)
def kept(node: Node, repaired: None) -> Iterator[None]:  # noqa: ARG001
    """What a test did to cards and config is undone."""
    yield
    node.kubectl("uncordon", node.name)
    node.configure(CONFIG)


def problem(node: Node, kind: str) -> dict[str, Any]:
    """Waits until the page has a problem of this kind."""

    def said() -> dict[str, Any]:
        problems = json.loads(node.page("/status.json"))["problems"]
        found: dict[str, Any]
        (found, *_) = (problem for problem in problems if problem["kind"] == kind)
        return found

    return node.wait_for(kind, said)


def typed(node: Node, command: str) -> str:
    program, *words = shlex.split(command)
    assert program == "kubectl"
    return node.kubectl(*words, check=False)


def test_a_refused_config_is_checked_in_the_agents_own_pod(node: Node) -> None:
    node.configure("interval: soon\n")
    command = problem(node, "ConfigRefused")["command"]
    assert "config.yaml:1" in typed(node, command)


def test_a_dead_card_has_its_pods_deleted_last_and_all_dead_ones_cordon_the_node(
    node: Node,
) -> None:
    node.run("worker", 1)
    card = node.environment("worker", "NPU_DEVNAME")[:4]
    node.fault("dead", card)
    dead = problem(node, "CardUnhealthy")
    with terminal(*node.cluster.command("bash", "-c", dead["command"])) as desk:
        desk.until("pressing enter")
        desk.type("\n")
        desk.ended()
    assert len(desk.output.splitlines()) > 20, "the kernel's last 50 lines"
    assert dead["headline"] == f"{card} is unhealthy"
    assert dead["pods"] == ["default/worker"]
    typed(node, dead["last_command"])
    assert node.objects("pod", "default") == []
    node.fault("dead", "npu0", "npu1")
    typed(node, problem(node, "AllCardsUnhealthy")["command"])
    assert node.get("node", node.name)["spec"]["unschedulable"]
