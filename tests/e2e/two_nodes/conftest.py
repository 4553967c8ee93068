"""A cluster of two nodes, whose agents may evict; each has two Warboys, and two RNGD by DRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cluster import Cluster, agent, workload
from tests.e2e.dra.claims import devices, prepared, taints
from tests.e2e.dra.test_evictions import EVICTING, PLUGIN
from tests.e2e.manifests import ONE, template
from tests.e2e.node import SOON, Node, joined, started
from tests.k8s.tools import overlay

CARDS = "warboy=2,rngd=2"
COMPONENTS = ("dra", "dra-classes", "impersonation", "eviction")
Nodes = tuple[Node, Node]


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """The first node, with the control plane."""
    with started(CARDS, agent(), workload(), name="npu-first") as running:
        yield running


@pytest.fixture(scope="package")
def nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Both nodes, with an agent on each."""
    directory = tmp_path_factory.mktemp("overlay")
    overlay(directory, COMPONENTS)
    with joined(cluster, CARDS, agent(), workload(), name="npu-second") as second:
        both = Node(cluster), Node(second)
        both[0].deploy(EVICTING, str(directory))
        cluster.apply(template(ONE))
        for node in both:
            offered(node)
        yield both


@pytest.fixture(scope="package")
def node(nodes: Nodes) -> Node:
    """The first node, whose cards die."""
    return nodes[0]


@pytest.fixture(scope="package")
def other(nodes: Nodes) -> Node:
    """The second node, whose cards stay healthy."""
    return nodes[1]


@pytest.fixture
def tidy(nodes: Nodes) -> Callable[[], None]:
    """Leaves no workloads, nothing prepared, and all cards offered."""

    def tidy() -> None:
        for kind in ("deployments", "statefulsets", "jobs"):
            nodes[0].kubectl("delete", kind, "--all", "--namespace", "default")
        nodes[0].delete_pods()
        nodes[0].kubectl("delete", "resourceclaims", "--all", "--namespace", "default")
        for node in nodes:
            offered(node)

    return tidy


def offered(node: Node) -> None:
    """Waits until all cards of a node are offered and free."""
    node.wait_equal("no claim to be prepared", lambda: prepared(node), set())
    node.wait_for("all cards to be well", lambda: well(node), 2 * SOON)


def well(node: Node) -> bool:
    """Whether all cards of a node are offered.

    One that was killed in three tests flaps, and has a taint for that, which keeps no Pod away.
    """
    assert node.allocatable(PLUGIN) == 2
    assert sorted(devices(node)) == [2, 3]
    return all({*taints(node, card).values()} <= {"None"} for card in (2, 3))
