"""A Pod that is gone from all lists: nobody gets its cards before its containers have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_agent.kubelet.pods import Pods
from tests.e2e.node import NAMESPACE, RESOURCE, SOON, WORKLOAD, Node, unified

STILL = "(not listed by the kubelet, but its containers run)"


def pod(name: str, seconds: str, grace: int = 0, **spec: str) -> dict[str, Any]:
    """A Pod with both cards that sleeps for `seconds`, by which its process is known.

    It takes no TERM, so that it runs for all of its `grace`.
    """
    main = {
        "name": "main",
        "image": WORKLOAD,
        "imagePullPolicy": "Never",
        "command": ["sleep", seconds],
        "resources": {"limits": {RESOURCE: "2"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            **spec,
            "terminationGracePeriodSeconds": grace,
            "restartPolicy": "Never",
            "containers": [main],
        },
    }


def log(node: Node) -> str:
    (agent,) = node.agent_pods()
    return node.cluster.logs(agent["metadata"]["name"], NAMESPACE)


@pytest.fixture(autouse=True)
def ended(node: Node) -> Iterator[None]:
    """Nothing of these tests outlives them."""
    yield
    node.cluster.enter("pkill", "-KILL", "-f", "sleep 100[0-9]{3}$", check=False)


def test_a_pod_is_deleted_by_force(node: Node) -> None:
    """A Pod is deleted with `--force`.

    The next one gets its cards when its containers have ended, 2 s later.
    """
    node.wait_allocatable(2)
    node.cluster.apply(pod("old", "100123"))
    node.wait_phase("old", "Running")
    node.cluster.apply(pod("next", "100456"))
    node.cluster.kubectl("delete", "pod", "old", "--force", "--grace-period=0")
    both = []

    def started() -> bool:
        both.append(node.sleeps("100123") and node.sleeps("100456"))
        assert node.pod("next")["status"]["phase"] == "Running", node.pod("next")["status"]
        return True

    node.cluster.wait_for("the next Pod to run", started, SOON)
    assert not any(both), both
    assert not node.sleeps("100123")
    assert STILL in log(node)


def test_the_next_pod_waits_and_is_not_failed(node: Node) -> None:
    """The next Pod comes when the agent knows already that the one before lives on."""
    node.wait_allocatable(2)
    node.cluster.apply(pod("old", "100123", grace=180))
    node.wait_phase("old", "Running")
    node.wait_known("old")
    node.forget_pod("old")
    time.sleep(4)  # two answers of pod-resources without it, a second or more apart
    node.cluster.apply(pod("next", "100456", nodeName=node.name))
    node.cluster.wait_for("its Allocate to wait", lambda: STILL in log(node), SOON)
    node.cluster.enter("pkill", "-KILL", "-f", "sleep 10012[3]")
    node.wait_phase("next", "Running")
    node.delete_pods("next")


def test_a_pod_that_nobody_lists_lives_on(node: Node) -> None:
    """A Pod is forgotten by the API server, and its containers do not end.

    Its cards are listed as unhealthy until they have, over a restart of the agent too.
    """
    node.wait_allocatable(2)
    node.cluster.apply(pod("old", "100123", grace=180))
    node.wait_phase("old", "Running")
    node.wait_known("old")
    node.forget_pod("old")
    node.wait_allocatable(0)
    assert f"Pod default/old {STILL}" in log(node)
    node.kill_agent()
    node.cluster.wait_for("the next agent", lambda: "registered resource" in log(node), SOON)
    node.cluster.apply(pod("next", "100456", nodeName=node.name))
    refused = node.wait_phase("next", "Failed")["status"]
    assert f"cannot allocate unhealthy devices {RESOURCE}" in refused["message"]
    assert node.sleeps("100123")
    node.cluster.enter("pkill", "-KILL", "-f", "sleep 10012[3]")
    node.wait_allocatable(2)


def test_cgroups_of_each_version_that_the_machine_has(node: Node, tmp_path: Path) -> None:
    """The agent of these tests sees those of version 2: others are read here."""
    node.cluster.apply(pod("one", "100789"))
    uid = node.wait_phase("one", "Running")["metadata"]["uid"]
    (tmp_path / "sys/fs").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").symlink_to(unified())
    each = [Pods(tmp_path, root) for root in {Path("/"), tmp_path}]

    def living() -> list[frozenset[str]]:
        async def asked() -> list[frozenset[str]]:
            return [await pods.living({uid, "another"}) for pods in each]

        return asyncio.run(asked())

    assert living() == [{uid}, {uid}]
    node.delete_pods("one")
    assert living() == [frozenset(), frozenset()]
