"""A Pod gets its NPU, on a real kubelet: each scenario asserted against the cluster."""

from __future__ import annotations

from typing import Any

from tests.e2e.node import NAMESPACE, RESOURCE, SOON, Node


def card_nodes(index: int) -> set[str]:
    """The nodes of a whole Warboy in a container, as facts on hardware list them."""
    names = ("", "_mgmt", "ch0", "ch1", "ch2", "ch3", "pe0", "pe1", "pe0-1")
    return {f"/dev/npu{index}{name}" for name in names}


def test_the_kubelet_offers_both_cards(node: Node) -> None:
    node.wait_allocatable(2)
    assert node.capacity() == 2


def test_the_agent_runs_without_privileges(node: Node) -> None:
    (pod,) = node.agent_pods()
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    status = node.in_agent("cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


def test_two_pods_get_a_card_each_and_a_third_waits(node: Node) -> None:
    node.wait_allocatable(2)
    node.run("one", 1)
    first = node.environment("one", "NPU_DEVNAME")
    assert first in ("npu0pe0-1", "npu1pe0-1")
    index = int(first[3])
    assert node.environment("one", "FURIOSA_DEVICES") == f"npu:{index}:0-1"
    # Exactly its own nodes: all of them open, and none of the other card's is there.
    assert node.nodes_in("one") == card_nodes(index)

    node.run("two", 1)
    assert node.environment("two", "NPU_DEVNAME") == f"npu{1 - index}pe0-1"
    assert node.nodes_in("two") == card_nodes(1 - index)
    held = node.held()
    assert held.keys() == {"one", "two"}
    assert held["one"] != held["two"]

    node.create("three", 1)
    unschedulable(node, "three")
    node.delete_pods("one")
    # The card that came free is had again, by the Pod that waited for it.
    node.wait_phase("three", "Running")
    assert node.environment("three", "NPU_DEVNAME") == first


def test_a_pod_that_asks_for_three_stays_pending(node: Node) -> None:
    node.wait_allocatable(2)
    node.create("greedy", 3)
    unschedulable(node, "greedy")


def test_a_pod_that_asks_for_two_gets_both(node: Node) -> None:
    node.wait_allocatable(2)
    node.run("both", 2)
    assert node.environment("both", "NPU_DEVNAME") == "npu0pe0-1,npu1pe0-1"
    assert node.nodes_in("both") == card_nodes(0) | card_nodes(1)


def test_the_kubelet_restarts_under_running_pods(node: Node) -> None:
    node.wait_allocatable(2)
    node.run("steady", 1)
    before, held = node.environment("steady", "NPU_DEVNAME"), node.held()["steady"]
    agent = node.agent_pods()[0]["metadata"]["uid"]

    node.cluster.stop_kubelet()
    node.cluster.start_kubelet()

    node.wait_allocatable(2)
    assert node.restarts() == {"steady": 0}
    assert node.held()["steady"] == held
    # No double allocation: the next Pod gets the other card, and one more has to wait.
    node.run("next", 1)
    assert node.environment("next", "NPU_DEVNAME") != before
    node.create("late", 1)
    unschedulable(node, "late")
    pods = node.agent_pods()
    assert [pod["metadata"]["uid"] for pod in pods] == [agent]
    assert pods[0]["status"]["containerStatuses"][0]["restartCount"] == 0


def test_the_kubelet_crashes_and_comes_back(node: Node) -> None:
    node.wait_allocatable(2)
    node.run("steady", 1)
    held = node.held()["steady"]
    node.cluster.kill_kubelet()
    node.cluster.start_kubelet()
    node.wait_allocatable(2)
    assert node.held()["steady"] == held
    assert node.restarts() == {"steady": 0}


def test_the_agents_pod_is_deleted(node: Node) -> None:
    node.wait_allocatable(2)
    node.run("undisturbed", 1)
    held = node.held()["undisturbed"]
    (old,) = node.agent_pods()

    node.cluster.kubectl(
        "delete", "pod", old["metadata"]["name"], "--namespace", NAMESPACE, "--timeout=60s"
    )

    def replaced() -> bool:
        (new,) = node.agent_pods()
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        status: dict[str, Any] = new["status"]["containerStatuses"][0]
        return bool(status["ready"])

    node.cluster.wait_for("a new agent", replaced, SOON)
    node.wait_allocatable(2)
    assert node.restarts() == {"undisturbed": 0}
    assert node.held()["undisturbed"] == held
    node.run("after", 1)
    assert node.held()["after"] != held


def test_single_mode_puts_two_pods_on_one_card(node: Node) -> None:
    node.deploy({"defaultPe": "Single"})
    try:
        node.wait_allocatable(4)
        node.run("left", 1)
        node.run("right", 1)
        names = {node.environment(pod, "NPU_DEVNAME") for pod in ("left", "right")}
        assert names in ({"npu0pe0", "npu0pe1"}, {"npu1pe0", "npu1pe1"})
        for pod in ("left", "right"):
            name = node.environment(pod, "NPU_DEVNAME")
            card, core = name[:4], name[6]
            shared = {f"/dev/{card}{part}" for part in ("_mgmt", "ch0", "ch1", "ch2", "ch3")}
            assert node.nodes_in(pod) == shared | {f"/dev/{card}pe{core}"}
        assert node.allocatable() == 4
    finally:
        node.delete_pods()
        node.deploy({"defaultPe": "Fusion"})
        node.wait_allocatable(2)


def unschedulable(node: Node, name: str) -> None:
    """The Pod stays Pending, and the scheduler says that the resource is what is missing."""

    def refused() -> bool:
        status = node.pod(name)["status"]
        conditions = {c["type"]: c for c in status.get("conditions", ())}
        scheduled = conditions["PodScheduled"]
        assert status["phase"] == "Pending"
        assert scheduled["status"] == "False", scheduled
        return f"Insufficient {RESOURCE}" in scheduled["message"]

    node.cluster.wait_for(f"Pod {name} to be refused by the scheduler", refused, SOON)
