"""A Pod gets its NPU, on a real kubelet: each scenario asserted against the cluster."""

from __future__ import annotations

import json

import pytest

from tests.e2e.doctor import checks
from tests.e2e.node import NAMESPACE, Node

pytestmark = pytest.mark.usefixtures("repaired")


def card_nodes(index: int) -> set[str]:
    """The nodes of a whole Warboy in a container, as facts on hardware list them."""
    names = ("", "_mgmt", "ch0", "ch1", "ch2", "ch3", "pe0", "pe1", "pe0-1")
    return {f"/dev/npu{index}{name}" for name in names}


def test_the_agent_runs_without_privileges(node: Node) -> None:
    status = node.in_agent("cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


@pytest.mark.one_kubelet
def test_an_agent_starts_without_a_warning(node: Node) -> None:
    """Each failed try of a probe is an Event, which a person finds after the installation."""
    of_agent = f"type=Warning,involvedObject.uid={node.agent()['metadata']['uid']}"
    events = node.objects("event", NAMESPACE, fieldSelector=of_agent)
    warnings = {event["reason"]: event["message"] for event in events}
    assert warnings.keys() <= {"MissingClusterDNS"}, warnings  # this cluster has none


@pytest.mark.one_kubelet
def test_commands_in_the_agents_pod_need_no_option(node: Node) -> None:
    node.run("holder", 1)
    index = int(node.environment("holder", "NPU_DEVNAME")[3])
    cards = json.loads(node.in_agent("npu-agent", "info", "-o", "json"))
    assert {card["name"]: [one["pod"] for one in card["pods"]] for card in cards} == {
        f"npu{index}": ["holder"],
        f"npu{1 - index}": [],
    }
    (held,) = json.loads(node.in_agent("npu-agent", "allocations", "-o", "json"))
    assert (held["pod"], held["card"], held["cores"]) == ("holder", f"npu{index}", "0-1")
    lines = {check["name"]: check for check in checks(node)}
    assert lines["config"]["detail"] == "/etc/npu-agent/config.yaml is good"
    assert lines["/sys"]["detail"].startswith("/host/sys")
    assert lines["agent"]["detail"].endswith("answers: it reports no problem")
    assert lines["cards"]["detail"].startswith("2: npu0")
    assert not [check for check in lines.values() if check["state"] in ("wrong", "unknown")]


def test_two_pods_get_a_card_each_and_a_third_waits(node: Node) -> None:
    assert node.capacity() == 2
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
    node.wait_unschedulable("three")
    node.delete_pods("one")
    # The card that came free goes to the Pod that waited for it.
    node.wait_phase("three", "Running")
    assert node.environment("three", "NPU_DEVNAME") == first


def test_a_pod_that_asks_for_two_gets_both(node: Node) -> None:
    node.run("both", 2)
    assert node.environment("both", "NPU_DEVNAME") == "npu0pe0-1,npu1pe0-1"
    assert node.nodes_in("both") == card_nodes(0) | card_nodes(1)


def test_two_pods_share_a_card_and_none_of_its_cores(node: Node) -> None:
    """`defaultPe` is changed to Single and back by edits, while Pods hold cards and cores."""
    before = node.agent_run()
    node.run("whole", 1)
    whole = node.environment("whole", "NPU_DEVNAME")[:4]

    node.configure({"defaultPe": "Single"})
    node.wait_equal("four devices", node.capacity, 4)
    # Two of them are the held card's cores, which no Pod may have.
    node.wait_allocatable(2)
    node.run("left", 1)
    assert not node.environment("left", "NPU_DEVNAME").startswith(whole)
    # The scheduler counts the Pod on the whole card as one of the two that are left.
    node.create("right", 1)
    node.wait_unschedulable("right")

    node.delete_pods("whole")
    node.wait_allocatable(4)
    node.wait_phase("right", "Running")
    names = {pod: node.environment(pod, "NPU_DEVNAME") for pod in ("left", "right")}
    assert names["left"] != names["right"]
    for pod, name in names.items():
        card, core = name[:4], name[6]
        shared = {f"/dev/{card}{part}" for part in ("_mgmt", "ch0", "ch1", "ch2", "ch3")}
        assert node.nodes_in(pod) == shared | {f"/dev/{card}pe{core}"}
    assert node.agent_run() == before

    # And back: no whole card of which a Pod holds a core is offered.
    cards = {name[:4] for name in names.values()}
    node.configure({"defaultPe": "Fusion"})
    node.wait_equal("two devices", node.capacity, 2)
    node.wait_allocatable(2 - len(cards))
    node.delete_pods("left", "right")
    node.wait_allocatable(2)
