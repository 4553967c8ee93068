"""What goes wrong on real nodes: card faults, edits, losses of the kubelet and of the agent.

The docstrings have two paragraphs, as in tests/chaos/attacks: what is done, and what has to hold.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.manifests import RESOURCE
from tests.e2e.node import NAMESPACE, SOON, Node
from tests.e2e.test_main_road import card_nodes

pytestmark = pytest.mark.usefixtures("repaired")


@contextlib.contextmanager
def keeps_its_card(node: Node, *, agent_stays: bool = True) -> Iterator[str]:
    """A Pod keeps its card over whatever happens, and the next one gets the other; a third waits.

    Nor is the agent restarted, if it `agent_stays`. Yields the card's name.
    """
    node.run("steady", 1)
    held, before = node.held()["steady"], node.agent_run()
    yield node.environment("steady", "NPU_DEVNAME")[:4]
    node.wait_allocatable(2)
    assert node.restarts() == {"steady": 0}
    assert node.held()["steady"] == held
    node.run("next", 1)
    assert node.held()["next"] != held
    node.wait_known("next")
    node.create("late", 1)
    node.wait_unschedulable("late")
    assert not agent_stays or node.agent_run() == before


# --- cards --------------------------------------------------------------------------------------


def test_a_card_fails_under_its_pod_and_recovers(node: Node) -> None:
    """A card dies under its Pod.

    The Pod's status shows it, and the Pod is not restarted. New Pods get the other card; one too
    many waits, and gets the card when that works again.
    """
    node.run("victim", 1)
    card = node.environment("victim", "NPU_DEVNAME")[:4]
    node.fault("dead", card)
    node.wait_allocatable(1)
    assert node.capacity() == 2
    if node.cluster.kubelet >= "1.36":

        def health() -> list[str]:
            status = node.pod("victim")["status"]["containerStatuses"][0]
            (resource,) = status["allocatedResourcesStatus"]
            assert resource["name"] == RESOURCE
            return [device["health"] for device in resource["resources"]]

        node.wait_equal("the Pod's status to show it", health, ["Unhealthy"])
    assert node.restarts() == {"victim": 0}
    node.delete_pods("victim")
    node.run("well", 1)
    assert node.nodes_in("well") == card_nodes(1 - int(card[3]))
    # The next one is refused by the scheduler and, without one, by the kubelet.
    node.create("waits", 1)
    node.wait_unschedulable("waits")
    node.create("forced", 1, nodeName=node.name)
    refused = node.wait_phase("forced", "Failed")["status"]
    assert refused["reason"] == "UnexpectedAdmissionError"
    assert f"unavailable for {RESOURCE}. Requested: 1, Available: 0" in refused["message"]

    node.fault("ok", card)
    node.wait_allocatable(2)
    node.wait_phase("waits", "Running")
    assert node.nodes_in("waits") == card_nodes(int(card[3]))


def test_the_driver_is_reloaded(node: Node) -> None:
    """A card is drained, then the driver is unloaded under a running Pod, and loaded again.

    The Node's capacity follows; the Pod keeps its card, and the next one gets the other.
    """
    with keeps_its_card(node) as card:
        node.fault("gone", "npu1" if card == "npu0" else "npu0")
        node.wait_equal("capacity without the card", node.capacity, 1)
        node.fault("gone", card)
        node.wait_equal("capacity without cards", node.capacity, 0)
        node.fault("back", "npu0", "npu1")


def entry(node: Node, card: str) -> Path:
    """Where the driver describes a card."""
    return node.cluster.host_root / f"sys/class/npu_mgmt/{card}_mgmt"


@contextlib.contextmanager
def rewritten(files: Mapping[Path, str]) -> Iterator[None]:
    """Files with another content for a while."""
    before = {path: path.read_text(encoding="utf-8") for path in files}
    try:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        yield
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")


@pytest.mark.one_kubelet
def test_cards_are_renumbered_under_a_pod(node: Node) -> None:
    """The cards are renumbered while a Pod holds one.

    No card with the nodes that the Pod was given is handed out before it ends.
    """

    def ids() -> dict[str, str]:
        return {card["name"]: card["id"] for card in node.cards()}

    before = ids()
    node.run("holder", 1)
    held, mine = node.held()["holder"], node.environment("holder", "NPU_DEVNAME")
    identity = ("device_uuid", "device_sn", "busname")
    files = [(entry(node, "npu0") / name, entry(node, "npu1") / name) for name in identity]
    swapped = {
        one: other.read_text(encoding="utf-8")
        for pair in files
        for one, other in (pair, pair[::-1])
    }
    with rewritten(swapped):
        other = {"npu0": before["npu1"], "npu1": before["npu0"]}
        node.wait_equal("both to be identified", ids, other)
        # The other card now has the nodes that the Pod was given.
        why = f"Pod default/holder still holds /dev/{mine[:4]} as {held}"
        node.wait_for("the status page to say so", lambda: why in node.page("/status.json"))
        node.wait_allocatable(1)
        node.create("late", 1)
        node.wait_unschedulable("late")
        assert node.held() == {"holder": held}
        node.delete_pods("holder")
        node.wait_phase("late", "Running")
        assert node.environment("late", "NPU_DEVNAME") != mine
        node.wait_known("late")
        node.wait_allocatable(2)
        node.delete_pods("late")
    node.wait_equal("the numbers to be as before", ids, before)


# --- the kubelet ----------------------------------------------------------------------------------


def test_the_kubelet_crashes_and_comes_back(node: Node) -> None:
    """The kubelet is killed, and starts.

    Registered again, and the running Pod keeps its card.
    """
    with keeps_its_card(node):
        node.cluster.kill_kubelet()
        node.cluster.start_kubelet()


@pytest.mark.one_kubelet
def test_the_kubelet_hangs_for_a_minute(node: Node) -> None:
    """The kubelet hangs for a minute (SIGSTOP).

    The registration is kept; the running Pod keeps its card, and the next one gets the other.
    """
    with keeps_its_card(node):
        node.cluster.signal_kubelet(signal.SIGSTOP)
        try:
            time.sleep(60)  # the scenario itself
        finally:
            node.cluster.signal_kubelet(signal.SIGCONT)
        node.wait_for("the Node to be ready", lambda: ready(node), 2 * SOON)
        # The kubelet never ended the stream, nor did the agent.
        assert "lost the kubelet" not in node.log().split("allocated resource")[-1]


def ready(node: Node) -> bool:
    """Whether the Node is Ready, and nothing keeps Pods away from it."""
    found = node.get("node", node.name)
    conditions = {c["type"]: c["status"] for c in found["status"]["conditions"]}
    return conditions["Ready"] == "True" and not found["spec"].get("taints")


def test_the_kubelet_dies_while_the_agent_registers(node: Node) -> None:
    """The kubelet is killed while the agent waits for its answer to Register.

    Registered with the next two, and a Pod gets both cards.
    """
    # Not while a rollout ends: the one that stands by would take over from one that fails here.
    node.wait_equal("one agent", lambda: len(node.all_agents()), 1)
    before = node.agent_run()
    (socket,) = (node.cluster.kubelet_dir / "device-plugins").glob("furiosa-npu-*.sock")
    node.cluster.signal_kubelet(signal.SIGSTOP)
    socket.unlink()
    node.wait_for("the agent to call", lambda: callers(node) > 0)
    node.cluster.kill_kubelet()
    # Twice: what the first loss leaves behind may show only at the second.
    node.cluster.start_kubelet()
    node.wait_allocatable(2)
    node.cluster.stop_kubelet()
    node.cluster.start_kubelet()
    node.wait_allocatable(2)
    node.run("both", 2)
    assert node.agent_run() == before


def callers(node: Node) -> int:
    """How many wait for the kubelet, which does not accept, at its registration socket."""
    table = node.cluster.enter("ss", "--unix", "--listening", "--no-header").stdout
    rows = [line.split() for line in table.splitlines()]
    (waiting,) = (row[2] for row in rows if row[4].endswith("device-plugins/kubelet.sock"))
    return int(waiting)


# --- the agent ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "deleted"])
def test_the_agent_is_lost_under_running_pods(node: Node, how: str) -> None:
    """The agent is killed (SIGKILL), or its Pod is deleted, under a running Pod.

    It is back, the Pod keeps its card, and the next one gets the other.
    """
    with keeps_its_card(node, agent_stays=False):
        before = node.agent_run()
        if how == "killed":
            node.kill_agent()
            node.wait_restarted(before)
        else:
            name = node.agent()["metadata"]["name"]
            node.kubectl("delete", "pod", name, "--namespace", NAMESPACE, "--timeout=60s")
            node.wait_for("a new agent", lambda: node.agent_run()[0] != before[0])
        node.wait_for("it to serve again", node.serves)


def test_devices_by_cdi(node: Node) -> None:
    """Devices are handed out by CDI names, and a card is drained meanwhile.

    The Pod has the nodes of its card, and the spec no longer has the one that went.
    """
    node.deploy({"allocation": {"method": "cdi"}}, "tests/e2e/cdi")
    try:
        spec = node.cluster.run_dir / "cdi" / "furiosa.ai-npu.json"

        def devices() -> list[str]:
            return [
                device["name"] for device in json.loads(spec.read_text(encoding="utf-8"))["devices"]
            ]

        node.wait_for("the spec to be written", spec.exists)
        node.wait_for("its agent to serve", node.serves)
        node.wait_allocatable(2)
        names = devices()
        node.run("one", 1)
        index = int(node.environment("one", "NPU_DEVNAME")[3])
        assert node.nodes_in("one") == card_nodes(index)
        assert node.held()["one"] == names[index]
        node.fault("gone", f"npu{1 - index}")
        # A Pod of an earlier test may have had that card: the kubelet's checkpoint still notes it,
        # and the agent, which has just started, holds what it notes for a minute.
        node.wait_equal("its spec to go too", devices, [names[index]], timeout=120)
    finally:
        node.delete_pods()
        node.deploy()
