"""The agent where the config asks for DRA and the cluster cannot do it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from npu_agent.agent import Agent, Timing
from npu_agent.config import AllocationConfig, LabelsConfig
from npu_agent.core.problems import unready
from npu_agent.core.state import SessionPhase
from npu_agent.simulator.apiserver import GROUP, NODES, StandInApiServer, served, status
from npu_agent.simulator.kubelet import StandInKubelet
from npu_agent.simulator.pluginmanager import StandInPluginManager
from tests.kube.helpers import kubeconfig
from tests.outputs.deviceplugin.helpers import short_directory
from tests.test_agent import Node
from tests.until import first, until

WANTED: dict[str, Any] = {
    "allocation": AllocationConfig(api="dra"),
    "labels": LabelsConfig(output="none"),
    "events": False,
}


@pytest.fixture
async def room() -> AsyncIterator[tuple[Node, StandInPluginManager]]:
    """A node with two cards, and the part of its kubelet that knows DRA drivers."""
    with short_directory() as directory:
        plugins = directory / "device-plugins"
        plugins.mkdir()
        kubelet = StandInKubelet(plugins, directory / "pod-resources")
        manager = StandInPluginManager(directory, interval=0.01)
        await kubelet.start()
        await manager.start()
        node = Node(directory / "host", plugins, kubelet, Timing(ask_again=0.05))
        node.cards("warboy=2")
        yield node, manager
        await manager.stop()
        await kubelet.stop()


def reasons(agent: Agent) -> list[str]:
    return list(unready(agent.state()))


@pytest.mark.parametrize(
    ("serves_dra", "kubelet", "reason"),
    [
        (False, "v1.36.3", "the API server does not serve resource.k8s.io/v1"),
        (True, "v1.33.9", "this node's kubelet is v1.33.9, and DRA needs 1.34 or later"),
    ],
    ids=["no DRA in the API server", "an old kubelet"],
)
async def test_dra_that_cannot_be_is_said_and_nothing_is_offered(
    room: tuple[Node, StandInPluginManager],
    serves_dra: bool,
    kubelet: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, manager = room
    cluster = StandInApiServer("this-node")
    info = cluster.objects[NODES]["this-node"]["status"]["nodeInfo"]
    info["kubeletVersion"] = kubelet
    if not serves_dra:
        cluster.groups.clear()
    async with served(cluster.answer) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
        async with node.agent(**WANTED) as agent:
            blocked = [f"DRA driver npu.furiosa.ai: blocked: {reason}"]
            await until(lambda: reasons(agent) == blocked, reason)
            await until(lambda: not manager.instances.value, "no driver is registered")
            assert agent.state().resources == ()
            assert node.kubelet.plugins.value == {}
            # The cluster is updated while the agent runs.
            cluster.groups.add(GROUP)
            info["kubeletVersion"] = "v1.36.3"
            await until(lambda: manager.instances.value, "the driver is registered")
            await until(
                lambda: agent.state().dra[0].session.phase is SessionPhase.REGISTERED, "registered"
            )


async def test_nothing_is_offered_before_it_is_known_that_dra_can_be(
    room: tuple[Node, StandInPluginManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an agent that stands by would be ready, and a rollout would end the one that works."""
    node, manager = room
    async with served(status(503, "away")) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
        async with node.agent(**WANTED) as agent:
            (driver,) = agent.drivers
            now = await first(driver.status, lambda now: now.phase is SessionPhase.WAITING)
            assert "not known yet whether this node can do DRA" in now.reason
            (why,) = unready(agent.state())
            assert why.endswith(now.reason)
            assert manager.instances.value == ()
