"""A Pod that is gone from all lists: its cards are free only when its containers have ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.manifests import RESOURCE, container, pod, thing
from tests.e2e.node import Node

STILL = "(not listed by the kubelet, but its containers still run)"
OLD, NEXT = "100123", "100456"
"""Seconds that a Pod sleeps, by which its process is known."""


def both(name: str, seconds: str, grace: int = 0, **spec: str) -> dict[str, Any]:
    """A Pod with both cards that sleeps, and takes no TERM: it runs for all of its `grace`."""
    sleeps = container(limits={RESOURCE: 2}, command=f"exec sleep {seconds}")
    return pod(name, sleeps, terminationGracePeriodSeconds=grace, **spec)


@pytest.fixture(autouse=True)
def ended(node: Node) -> Iterator[None]:
    """Nothing of these tests outlives them."""
    node.wait_allocatable(2)
    yield
    for seconds in (OLD, NEXT):
        node.end_sleep(seconds)


@pytest.fixture
def forgotten(node: Node) -> None:
    """A Pod is forgotten by the API server, and its containers run on."""
    node.apply(both("old", OLD, grace=180))
    node.wait_phase("old", "Running")
    node.wait_known("old")
    node.forget_pod("old")


def test_a_pod_is_deleted_by_force(node: Node) -> None:
    """The next one gets its cards when its containers have ended, 2 s later."""
    node.apply(both("old", OLD))
    node.wait_phase("old", "Running")
    node.apply(both("next", NEXT))
    node.delete_by_force("old")
    twice = []

    def phase() -> str:
        twice.append(node.sleeps(OLD) and node.sleeps(NEXT))
        return str(node.pod("next")["status"]["phase"])

    node.wait_equal("the next Pod to run", phase, "Running")
    assert not any(twice), twice
    assert not node.sleeps(OLD)
    assert STILL in node.log()


@pytest.mark.usefixtures("forgotten")
def test_a_pod_that_is_not_listed_lives_on(node: Node) -> None:
    """Its cards are unhealthy until its containers end, over a restart of the agent too."""
    node.wait_allocatable(0)
    assert f"Pod default/old {STILL}" in node.log()
    before = node.agent_run()
    node.kill_agent()
    node.wait_restarted(before)
    node.wait_for("the next agent", node.serves)
    node.apply(both("next", NEXT, nodeName=node.name))
    refused = node.wait_phase("next", "Failed")["status"]
    assert f"cannot allocate unhealthy devices {RESOURCE}" in refused["message"]
    assert node.sleeps(OLD)
    node.end_sleep(OLD)
    node.wait_allocatable(2)


def test_an_init_container_that_waits_for_a_volume_keeps_its_cores(node: Node) -> None:
    """The agent restarts meanwhile, and cuts the cards in another way."""
    mounts = [{"name": "late", "mountPath": "/late"}]
    init = container("init", limits={RESOURCE: 1}, command=f"exec sleep {OLD}", volumeMounts=mounts)
    late = {"name": "late", "secret": {"secretName": "late"}}
    node.apply(pod("waits", container(), initContainers=[init], volumes=[late]))
    node.wait_for("its Allocate", lambda: "allocated" in node.log())
    with node.without_agent():
        node.configure({"defaultPe": "Single"})
    node.wait_equal("four cores", node.capacity, 4)
    node.wait_allocatable(2)
    until = time.monotonic() + 10  # two answers without it ended an allocation
    while time.monotonic() < until:
        assert node.allocatable() == 2
        time.sleep(0.5)
    node.apply(thing("Secret", "late"))
    node.wait_for("the init container to run", lambda: node.sleeps(OLD))
    node.apply(pod("next", container(limits={RESOURCE: 1}, command=f"exec sleep {NEXT}")))
    node.wait_phase("next", "Running")
    assert node.sleeps(OLD)
    assert cards_of(node, "next").isdisjoint(cards_of(node, "waits", "init"))
    for name in ("waits", "next"):
        node.kubectl("delete", "pod", name, "--namespace=default")
    node.wait_allocatable(4)
    node.configure({})
    node.wait_equal("two cards", node.capacity, 2)


def cards_of(node: Node, name: str, of: str = "main") -> set[str]:
    """The cards of which a container has any part, by a node that all of them share."""
    where = (f"pod/{name}", "--namespace=default", f"--container={of}")
    listed = node.kubectl("exec", *where, "--", "sh", "-c", "ls -d /dev/npu?_mgmt")
    return set(listed.split())


@pytest.mark.one_kubelet
@pytest.mark.usefixtures("forgotten")
def test_such_a_pod_keeps_its_cores_without_the_agents_record(node: Node) -> None:
    """Its cards are known by the kubelet's notes, in all shapes."""
    with node.without_agent():
        (node.cluster.kubelet_dir / "device-plugins" / ".npu-agent.ledger.json").unlink()
        node.configure({"defaultPe": "Single"})
    node.wait_equal("four cores", node.capacity, 4)
    node.wait_for("the Pod to be known", lambda: STILL in node.log())
    assert node.sleeps(OLD)
    assert node.allocatable() == 0
    node.end_sleep(OLD)
    node.wait_allocatable(4)
    node.configure({})
    node.wait_equal("two cards", node.capacity, 2)
