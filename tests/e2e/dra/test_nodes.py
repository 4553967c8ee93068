"""Four nodes move from the device plugin to DRA and back, one after the other, under churn.

A Deployment of old Pods runs on them, which end at random all the while and are replaced, and are
never edited. In each direction an agent is killed and a kubelet restarts in the middle of a move.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest
import yaml

from tests.cluster import Cluster, ClusterError, agent
from tests.e2e.dra.claims import devices
from tests.e2e.dra.conftest import CLASSES, OVERLAY
from tests.e2e.dra.test_churn import AUDIT
from tests.e2e.dra.test_move import (
    DRA,
    PLUGIN,
    all_run_by,
    cordoned,
    everything_is,
    old_pods,
    pods,
    watched,
)
from tests.e2e.node import SOON, Node, simulated

NODES = 4
REPLICAS = 6
CARDS = 3
"""On each node: a Pod that waits for its node's move finds a card elsewhere."""
SYNC = {"syncFrequency": "1s"}
LONGEST = 8 * SOON
"""Seconds that one node may take under churn."""
VERIFY = 'said=$(npu-agent verify --expect 1) || echo "$HOSTNAME $said" >>/audit/wrong\n'
VERIFIED = AUDIT.replace("exec sleep", f"{VERIFY}exec sleep")
"""Beside the locks, which tell who has a card: the nodes and the environment are those of one."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Sequence[Node]]:
    """A cluster of four nodes, each with its own cards, kubelet and agent, by the device plugin."""
    with ExitStack() as stack:
        workdirs = [Path(tempfile.mkdtemp(prefix="npu-e2e-", dir="/tmp")) for _ in range(NODES)]
        first = stack.enter_context(
            Cluster.start(workdirs[0], node_name="npu-move-1", kubelet_config=SYNC)
        )
        clusters = [first]
        for number, workdir in enumerate(workdirs[1:], 2):
            joined = first.join(workdir, f"npu-move-{number}", kubelet_config=SYNC)
            clusters.append(stack.enter_context(joined))
        for cluster in clusters:
            cluster.import_image(agent().archive)
            stack.enter_context(simulated(cluster, "warboy=1,rngd=2"))
            (cluster.workdir / "varlib" / "audit").mkdir()
        first.apply(list(yaml.safe_load_all(CLASSES.read_text())))
        running = [Node(first)]
        running[0].deploy({"allocation": {"api": PLUGIN}}, OVERLAY)
        running += [Node(cluster) for cluster in clusters[1:]]  # which labels them for the agent
        for node in running:
            everything_is(node, PLUGIN, 4 * SOON, CARDS)
        yield running


@pytest.fixture
def node(nodes: Sequence[Node]) -> Node:
    """The one whose story is printed, and whose Pods are deleted, in the end."""
    return nodes[0]


@pytest.fixture
def tidy() -> Callable[[], None]:
    """Leaves all to the end of the clusters."""
    return lambda: None


class Churn(threading.Thread):
    """Ends Pods at random all the while, half of them on the node that moves.

    Attributes:
        where: the Node that moves.
        ended: how many have been deleted.
    """

    def __init__(self, cluster: Cluster, chosen: random.Random) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.chosen = chosen
        self.where = ""
        self.ended = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            try:
                found = self.cluster.objects("pod", "default")
                self.end_one([one for one in found if "deletionTimestamp" not in one["metadata"]])
            except ClusterError:  # it has ended by itself, or the machine is slow
                continue

    def end_one(self, found: list[dict[str, dict[str, str]]]) -> None:
        # No faster than they come. One that does not run is as good as any: an old scheduler's
        # choice may have been refused.
        if sum(one["status"]["phase"] == "Running" for one in found) < REPLICAS // 2:
            return
        here = [one for one in found if one["spec"].get("nodeName") == self.where]
        one = self.chosen.choice(here if here and self.chosen.random() < 0.5 else found)
        where = ("--namespace", "default", "--wait=false")
        self.cluster.kubectl("delete", "pod", one["metadata"]["name"], *where)
        self.ended += 1


@contextmanager
def churning(cluster: Cluster) -> Iterator[Churn]:
    """Pods end meanwhile."""
    churn = Churn(cluster, random.Random(NODES))
    churn.start()
    try:
        yield churn
    finally:
        churn.over.set()
        churn.join(2 * SOON)


@pytest.mark.long
@pytest.mark.timeout(1800)  # not for the module: tests/conftest.py has the last word there
def test_four_nodes_move_one_by_one_and_come_back_under_churn(nodes: Sequence[Node]) -> None:
    first = nodes[0]
    first.apply(old_pods(Path("/var/lib/audit"), REPLICAS, VERIFIED))
    all_run_by(first, PLUGIN, REPLICAS)
    moved: list[str] = []
    with watched(*nodes, cards=CARDS):
        for api in (DRA, PLUGIN):
            with churning(first.cluster) as churn:
                for number, node in enumerate(nodes):
                    churn.where = node.name
                    (moved.append if api == DRA else moved.remove)(node.name)
                    started, ended = time.monotonic(), churn.ended
                    moves(node, moved, kubelet_restarts=number == 1, agent_dies=number == 2)
                    everything_is(node, api, LONGEST, CARDS)
                    took, ended = time.monotonic() - started, churn.ended - ended
                    print(f"{node.name} moved to {api} in {took:.0f} s, while {ended} Pods ended")
            assert churn.ended > REPLICAS
            all_run_by(first, api, REPLICAS)
    audited(nodes)


def moves(node: Node, moved: Sequence[str], *, kubelet_restarts: bool, agent_dies: bool) -> None:
    """Edits the one ConfigMap that all nodes have, as docs/migration.md says.

    Args:
        node: the one that moves.
        moved: the Nodes that offer their cards by DRA from here on.
        kubelet_restarts: it does, while its Pods are of one kind, as the page asks for.
        agent_dies: it does, when its cards have begun to leave.
    """
    allocation = {"api": PLUGIN, "nodes": [{"nodeName": name, "api": DRA} for name in moved]}
    cordon = node.name in moved or kubelet_restarts
    with cordoned(node) if cordon else nullcontext():
        node.configure(yaml.safe_dump({"allocation": allocation}))
        if node.name in moved:
            node.wait_allocatable(0, 2 * SOON)
        else:
            node.wait_for("cards to leave", lambda: len(free(node)) < CARDS, 2 * SOON)
        if kubelet_restarts:
            node.cluster.stop_kubelet()
            node.cluster.start_kubelet()
    if agent_dies:
        node.kill_agent()


def free(node: Node) -> list[int]:
    """The cards that a claim may have."""
    return [card for card, one in devices(node).items() if not one.get("taints")]


def audited(nodes: Sequence[Node]) -> None:
    """What the Pods have seen, and that they are those of the beginning."""
    counts = []
    for node in nodes:
        audit = node.cluster.workdir / "varlib" / "audit"
        for wrong in (audit / "twice", audit / "wrong"):
            assert not wrong.exists(), f"{node.name}: {wrong.read_text()}"
        cards = [line.split()[1:] for line in (audit / "seen").read_text().splitlines()]
        assert {len(of_one) for of_one in cards} == {1}, cards
        counts.append(len(cards))
    print(f"{counts} Pods on the nodes, each with one card that nobody else had")
    assert sum(counts) > 2 * REPLICAS
    assert nodes[0].get("deployment", "old", "default")["metadata"]["generation"] == 1
    (revision,) = {one["metadata"]["labels"]["pod-template-hash"] for one in pods(nodes[0])}
    assert revision
    assert set(nodes[0].restarts().values()) == {0}
