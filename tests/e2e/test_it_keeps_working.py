"""What goes wrong on real nodes: sick cards, edits, losses of the kubelet and of the agent."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.node import NAMESPACE, RESOURCE, SOON, Node
from tests.e2e.test_main_road import card_nodes, unschedulable


@pytest.fixture(autouse=True)
def well_again(node: Node) -> Iterator[None]:
    """Whatever a test did to cards and config is undone."""
    node.wait_allocatable(2)
    yield
    node.delete_pods()
    for card in ("npu0", "npu1"):
        node.fault(card, "ok")
    node.configure("defaultPe: Fusion\n")
    node.wait_allocatable(2)


def agents(node: Node) -> list[tuple[str, int]]:
    """The agent's Pods and how often each was restarted."""
    return [
        (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
        for pod in node.agent_pods()
    ]


def test_a_card_dies_and_comes_back(node: Node) -> None:
    """A card dies and comes back.

    New Pods get the other one; one too many waits, and gets the card when that works again.
    """
    node.fault("npu1", "dead")
    node.wait_allocatable(1)
    assert node.capacity() == 2
    node.run("well", 1)
    assert node.environment("well", "NPU_DEVNAME") == "npu0pe0-1"
    # The next one is refused, by the scheduler and, where that is passed by, by the kubelet.
    node.create("waits", 1)
    unschedulable(node, "waits")
    node.create("forced", 1, nodeName=node.name)
    refused = node.wait_phase("forced", "Failed")["status"]
    assert refused["reason"] == "UnexpectedAdmissionError"
    assert f"unavailable for {RESOURCE}. Requested: 1, Available: 0" in refused["message"]

    node.fault("npu1", "ok")
    node.wait_allocatable(2)
    node.wait_phase("waits", "Running")
    assert node.environment("waits", "NPU_DEVNAME") == "npu1pe0-1"


def test_a_card_dies_under_its_pod(node: Node) -> None:
    """A card dies under its Pod.

    The Pod's status shows it; the Pod is not restarted; the card is offered when it works again.
    """
    node.run("victim", 1)
    card = node.environment("victim", "NPU_DEVNAME")[:4]
    node.fault(card, "dead")
    node.wait_allocatable(1)
    if node.cluster.kubelet >= "1.36":
        node.cluster.wait_for("the Pod's status to show it", lambda: sick(node, "victim"), SOON)
    node.fault(card, "ok")
    node.wait_allocatable(2)
    assert node.restarts() == {"victim": 0}


def sick(node: Node, pod: str) -> bool:
    """Whether the Pod's status says that its device is unhealthy."""
    status = node.pod(pod)["status"]["containerStatuses"][0]
    (resource,) = status["allocatedResourcesStatus"]
    assert resource["name"] == RESOURCE
    return [device["health"] for device in resource["resources"]] == ["Unhealthy"]


def test_a_card_that_hangs_is_fenced_and_harms_no_other(node: Node) -> None:
    """Reading a card hangs.

    It is fenced, and a new Pod gets the other one.
    """
    node.fault("npu1", "hang")
    node.wait_allocatable(1)
    node.run("well", 1)
    assert node.nodes_in("well") == card_nodes(0)
    node.fault("npu1", "ok")
    node.wait_allocatable(2)


def test_a_card_is_drained_and_comes_back(node: Node) -> None:
    """A card is drained and comes back.

    The Node's capacity follows, down and up.
    """
    node.fault("npu0", "gone")
    node.wait_allocatable(1)
    node.cluster.wait_for("capacity to fall too", lambda: node.capacity() == 1, SOON)
    node.fault("npu0", "back")
    node.wait_allocatable(2)
    node.run("both", 2)
    assert node.nodes_in("both") == card_nodes(0) | card_nodes(1)


def test_the_driver_is_reloaded(node: Node) -> None:
    """The driver is unloaded under a running Pod, and loaded again.

    The Pod keeps its card, and the next one gets the other.
    """
    node.run("steady", 1)
    held = node.held()["steady"]
    for card in ("npu0", "npu1"):
        node.fault(card, "gone")
    node.cluster.wait_for("no card", lambda: node.capacity() == 0, SOON)
    for card in ("npu0", "npu1"):
        node.fault(card, "back")
    node.wait_allocatable(2)
    assert node.held()["steady"] == held
    node.run("next", 1)
    assert node.held()["next"] != held
    wait_seen(node, "next")


def entry(node: Node, card: str) -> Path:
    """Where the driver describes a card."""
    return node.cluster.host_root / f"sys/class/npu_mgmt/{card}_mgmt"


@contextlib.contextmanager
def rewritten(files: Mapping[Path, str]) -> Iterator[None]:
    """Files with another content for a while."""
    before = {path: path.read_text() for path in files}
    try:
        for path, text in files.items():
            path.write_text(text)
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


def status_page(node: Node) -> str:
    """What the agent says of itself, for programs."""
    url = "http://127.0.0.1:9100/status.json"
    read = f"import urllib.request as r; print(r.urlopen({url!r}).read().decode())"
    return node.in_agent("python3", "-c", read)


def ids(node: Node) -> dict[str, str]:
    """The ID of each card, by its name."""
    return {card["name"]: card["id"] for card in json.loads(status_page(node))["cards"]}


def wait_said(node: Node, *words: str) -> None:
    """Waits until the status page has all of these."""

    def said() -> bool:
        page = status_page(node)
        assert all(word in page for word in words), page
        return True

    node.cluster.wait_for(f"the status page to say {words}", said, SOON)


def wait_seen(node: Node, pod: str) -> None:
    """Waits until the agent has seen the Pod: a grant of one never seen holds for a minute."""

    def seen() -> bool:
        cards = json.loads(status_page(node))["cards"]
        return any(holder["pod"] == pod for card in cards for holder in card["holders"])

    node.cluster.wait_for(f"the agent to see the Pod {pod}", seen, SOON)


def test_a_second_card_says_the_uuid_of_a_held_one(node: Node) -> None:
    """A second card says the UUID of one that a Pod holds.

    The held card keeps its ID, and nothing of it is handed out before the Pod ends.
    """
    node.run("holder", 1)
    held, mine = node.held()["holder"], node.environment("holder", "NPU_DEVNAME")[:4]
    newcomer = entry(node, "npu1" if mine == "npu0" else "npu0") / "device_uuid"
    own = newcomer.read_text().strip()
    with rewritten({newcomer: held}):
        # The known card keeps its ID, and the newcomer might be the card that is held.
        wait_said(node, "Pod default/holder still holds its cores as")
        node.wait_allocatable(1)
        node.create("late", 1)
        unschedulable(node, "late")
        assert node.held() == {"holder": held}
        node.delete_pods("holder")
        node.wait_phase("late", "Running")
        assert node.held() == {"late": held}
        wait_seen(node, "late")
        node.delete_pods("late")
        node.wait_allocatable(2)
    node.cluster.wait_for("the card's own UUID", lambda: own in ids(node).values(), SOON)
    node.wait_allocatable(2)


def test_cards_are_renumbered_under_a_pod(node: Node) -> None:
    """The cards are renumbered while a Pod holds one.

    No card with the nodes that the Pod was given is handed out before it ends.
    """
    before = ids(node)
    node.run("holder", 1)
    held, mine = node.held()["holder"], node.environment("holder", "NPU_DEVNAME")
    identity = ("device_uuid", "device_sn", "busname")
    files = [(entry(node, "npu0") / name, entry(node, "npu1") / name) for name in identity]
    swapped = {one: other.read_text() for pair in files for one, other in (pair, pair[::-1])}
    with rewritten(swapped):
        other = {"npu0": before["npu1"], "npu1": before["npu0"]}
        node.cluster.wait_for("both to be identified", lambda: ids(node) == other, SOON)
        # The other card now has the nodes that the Pod was given.
        wait_said(node, f"Pod default/holder still holds /dev/{mine[:4]} as {held}")
        node.wait_allocatable(1)
        node.create("late", 1)
        unschedulable(node, "late")
        assert node.held() == {"holder": held}
        node.delete_pods("holder")
        node.wait_phase("late", "Running")
        assert node.environment("late", "NPU_DEVNAME") != mine
        wait_seen(node, "late")
        node.wait_allocatable(2)
        node.delete_pods("late")
    node.cluster.wait_for("the numbers to be as before", lambda: ids(node) == before, SOON)


def test_a_card_is_disabled_by_an_edit(node: Node) -> None:
    """A card is disabled by an edit of the ConfigMap.

    It is not offered any more, and a card that the edit disables on another node is; no restart.
    """
    before = agents(node)
    node.configure(
        yaml.safe_dump(
            {
                "disabledDevices": [
                    {"devName": "npu0", "nodeName": node.name},
                    {"devName": "npu1", "nodeName": "another-node"},
                ]
            }
        )
    )
    node.wait_allocatable(1)
    node.run("one", 1)
    assert node.environment("one", "NPU_DEVNAME") == "npu1pe0-1"
    node.configure("defaultPe: Fusion\n")
    node.wait_allocatable(2)
    assert agents(node) == before


def test_single_by_an_edit_while_a_pod_holds_a_whole_card(node: Node) -> None:
    """`defaultPe` is changed to Single and back while Pods hold cards and cores.

    No core is in two containers at any time.
    """
    before = agents(node)
    node.run("whole", 1)
    whole = node.environment("whole", "NPU_DEVNAME")[:4]

    node.configure("defaultPe: Single\n")
    node.cluster.wait_for("four devices", lambda: node.capacity() == 4, SOON)
    # Two of them are the held card's cores, and nobody may have those.
    node.wait_allocatable(2)
    node.run("left", 1)
    assert not node.environment("left", "NPU_DEVNAME").startswith(whole)
    # The scheduler counts the Pod on the whole card as one of the two that are left.
    node.create("right", 1)
    unschedulable(node, "right")

    node.delete_pods("whole")
    node.wait_allocatable(4)
    node.wait_phase("right", "Running")
    names = {node.environment(pod, "NPU_DEVNAME") for pod in ("left", "right")}
    assert len(names) == 2
    assert agents(node) == before

    # And back: no whole card of which somebody holds a core is offered.
    cards = {name[:4] for name in names}
    node.configure("defaultPe: Fusion\n")
    node.cluster.wait_for("two devices", lambda: node.capacity() == 2, SOON)
    node.wait_allocatable(2 - len(cards))
    node.delete_pods("left", "right")
    node.wait_allocatable(2)


def test_a_broken_edit_changes_nothing(node: Node) -> None:
    """The ConfigMap is edited wrongly.

    The log names line and key, and the last good config stays in force.
    """
    before = agents(node)
    node.configure("defaultPe: Single\ninterval: soon\n")

    def told() -> bool:
        log = node.cluster.logs(node.agent_pods()[0]["metadata"]["name"], NAMESPACE)
        return "config.yaml:2: interval" in log

    node.cluster.wait_for("the agent to name line and key", told, SOON)
    assert (node.capacity(), node.allocatable()) == (2, 2)
    assert agents(node) == before


def test_the_kubelet_is_away_for_a_minute(node: Node) -> None:
    """The kubelet is away for a minute.

    Registered again, the running Pod keeps its card, and the log is not flooded.
    """
    node.run("steady", 1)
    held, before = node.held()["steady"], agents(node)
    node.cluster.stop_kubelet()
    time.sleep(60)  # the scenario itself: long enough for every back-off to reach its end
    node.cluster.start_kubelet()
    node.wait_allocatable(2)
    assert node.held()["steady"] == held
    assert agents(node) == before
    waited = node.cluster.logs(node.agent_pods()[0]["metadata"]["name"], NAMESPACE)
    assert waited.count("not registered: trying again") < 5
    node.run("next", 1)


def test_the_kubelet_hangs_for_a_minute(node: Node) -> None:
    """The kubelet hangs for a minute (SIGSTOP).

    The registration is kept; the running Pod keeps its card, and the next one gets the other.
    """
    node.run("steady", 1)
    held, before = node.held()["steady"], agents(node)
    node.cluster.signal_kubelet(signal.SIGSTOP)
    try:
        time.sleep(60)  # the scenario itself
    finally:
        node.cluster.signal_kubelet(signal.SIGCONT)
    node.cluster.wait_for("the Node to be ready", lambda: ready(node), 2 * SOON)
    node.wait_allocatable(2)
    # It never let go of the agent, and the agent did not ask it to.
    log = node.cluster.logs(node.agent_pods()[0]["metadata"]["name"], NAMESPACE)
    assert "lost the kubelet" not in log.split("allocated resource")[-1]
    assert agents(node) == before
    assert node.held()["steady"] == held
    node.run("next", 1)


def test_the_kubelet_dies_while_the_agent_registers(node: Node) -> None:
    """The kubelet is killed while the agent waits for its answer to Register.

    Registered with the next two, and a Pod gets both cards.
    """
    # Not while a rollout ends: the one that stands by would take over from one that fails here.
    node.cluster.wait_for("one agent", lambda: instances(node) == 1, SOON)
    before = agents(node)
    directory = node.cluster.kubelet_dir / "device-plugins"
    (socket,) = directory.glob("furiosa-npu-*.sock")
    node.cluster.signal_kubelet(signal.SIGSTOP)
    socket.unlink()
    node.cluster.wait_for("the agent to call", lambda: callers(node) > 0, SOON)
    node.cluster.kill_kubelet()
    # Twice, as what the first loss leaves behind may show only at the second.
    node.cluster.start_kubelet()
    node.wait_allocatable(2)
    node.cluster.stop_kubelet()
    node.cluster.start_kubelet()
    node.wait_allocatable(2)
    node.run("both", 2)
    assert agents(node) == before


def instances(node: Node) -> int:
    """How many agents there are, with those that are being deleted."""
    selector = "app.kubernetes.io/name=npu-agent"
    return len(node.cluster.objects("pod", NAMESPACE, labelSelector=selector))


def callers(node: Node) -> int:
    """How many wait for the kubelet, which does not accept, at its registration socket."""
    table = subprocess.run(
        node.cluster.command("ss", "--unix", "--listening", "--no-header"),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    rows = [line.split() for line in table.splitlines()]
    (waiting,) = (row[2] for row in rows if row[4].endswith("device-plugins/kubelet.sock"))
    return int(waiting)


def ready(node: Node) -> bool:
    """Whether the Node is Ready, and nothing keeps Pods away from it."""
    found = node.cluster.get("node", node.name)
    conditions = {c["type"]: c["status"] for c in found["status"]["conditions"]}
    return conditions["Ready"] == "True" and not found["spec"].get("taints")


def test_the_agent_is_killed_under_running_pods(node: Node) -> None:
    """The agent is killed (SIGKILL) under a running Pod.

    It is back, the Pod keeps its card, and the next one gets the other.
    """
    node.run("steady", 1)
    held, (before,) = node.held()["steady"], agents(node)
    node.kill_agent()

    def restarted() -> bool:
        ((uid, restarts),) = agents(node)
        return uid == before[0] and restarts == before[1] + 1

    node.cluster.wait_for("the agent's container to be restarted", restarted, 2 * SOON)
    node.cluster.wait_for("it to serve again", lambda: serves(node), SOON)
    node.wait_allocatable(2)
    assert node.restarts() == {"steady": 0}
    assert node.held()["steady"] == held
    node.run("next", 1)
    assert node.held()["next"] != held
    wait_seen(node, "next")


def test_a_rolling_update_leaves_no_gap(node: Node) -> None:
    """The agent is updated while a Pod runs.

    The Node's capacity never falls, and its allocatable is never 0 twice in a row.
    """
    node.run("steady", 1)
    held = node.held()["steady"]
    with watched(node) as seen:
        node.restart()
        node.cluster.wait_for("the new agent to take over", lambda: serves(node), SOON)
        node.wait_allocatable(2)
        node.run("next", 1)
    assert seen
    # The kubelet never forgot the resource. It may have reported the moment of the hand-over, some
    # hundredths of a second in which nobody serves, but not twice in a row.
    assert {capacity for capacity, _ in seen} == {2}
    allocatable = [count for _, count in seen]
    assert (0, 0) not in pairwise(allocatable)
    assert node.held()["steady"] == held


@contextlib.contextmanager
def watched(node: Node) -> Iterator[list[tuple[int, int]]]:
    """Collects (capacity, allocatable) from every version of the Node meanwhile."""
    command = ("kubectl", "get", "node", node.name, "--watch", "--output", "json")
    seen: list[tuple[int, int]] = []
    watch = subprocess.Popen(node.cluster.command(*command), stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None

    def collect(stream: Any) -> None:
        decoder, text = json.JSONDecoder(), ""
        for line in stream:
            text += line
            if line != "}\n":
                continue
            status = decoder.decode(text)["status"]
            text = ""
            seen.append(
                (
                    int(status["capacity"].get(RESOURCE, -1)),
                    int(status["allocatable"].get(RESOURCE, -1)),
                )
            )

    collecting = threading.Thread(target=collect, args=(watch.stdout,), daemon=True)
    collecting.start()
    node.cluster.wait_for("the Node as it is", lambda: seen, SOON)
    try:
        yield seen
    finally:
        # Not `watch` itself: that is what entered the namespaces, and kubectl would outlive it.
        subprocess.run(node.cluster.command("pkill", "-f", " ".join(command)), check=True)
        watch.wait(10)
        collecting.join(30)  # it reads to the end first
        watch.stdout.close()


def serves(node: Node) -> bool:
    """Whether the one agent that is left has registered, by its own log."""
    (pod,) = node.agent_pods()
    return "registered resource" in node.cluster.logs(pod["metadata"]["name"], NAMESPACE)


def test_devices_by_cdi(node: Node) -> None:
    """Devices are handed out by CDI names, and a card is drained meanwhile.

    The Pod has the nodes of its card, and the spec no longer has the one that went.
    """
    node.deploy({"allocation": {"method": "cdi"}}, "tests/e2e/cdi")
    try:
        spec = node.cluster.run_dir / "cdi" / "furiosa.ai-npu.json"
        node.cluster.wait_for("the spec to be written", spec.exists, SOON)
        node.cluster.wait_for("its agent to serve", lambda: serves(node), SOON)
        node.wait_allocatable(2)
        names = [device["name"] for device in json.loads(spec.read_text())["devices"]]
        node.run("one", 1)
        index = int(node.environment("one", "NPU_DEVNAME")[3])
        assert node.nodes_in("one") == card_nodes(index)
        assert node.held()["one"] == names[index]
        node.fault(f"npu{1 - index}", "gone")
        node.cluster.wait_for(
            "its spec to go too",
            lambda: [d["name"] for d in json.loads(spec.read_text())["devices"]] == [names[index]],
            SOON,
        )
    finally:
        node.delete_pods()
        node.deploy({"defaultPe": "Fusion"})
