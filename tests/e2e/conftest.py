"""A real node with simulated cards and the agent deployed from k8s/, for each kubelet."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.cluster import KUBELETS, RELEASE, Cluster, agent, workload
from tests.e2e.api import SECRETS
from tests.e2e.node import Node, started

FAILED = pytest.StashKey[bool]()
FOLDERS = {
    "/dra/": "DRA",
    "/journey/": "journey",
    "/rollout/": "rollout",
    "/two_nodes/": "two nodes",
}
"""Those with a cluster of their own."""
ABOUT_THE_API = (
    "test_dra_examples",
    "test_dra_slices",
    "test_impersonation",
    "test_labels",
    "test_node_condition",
    "test_policies",
)
"""Modules on a cluster of their own: else the newest kubelet's would take by far the longest."""
LONGEST_FIRST = (
    "journey",
    "DRA",
    "API server",
    *sorted(KUBELETS, reverse=True),
    "rollout",
    "two nodes",
)


def pytest_configure(config: pytest.Config) -> None:
    if os.geteuid() != 0:
        pytest.exit("the e2e tests start a real Kubernetes and need root: sudo make e2e", 1)
    # xdist would begin with the scope that has the most tests.
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What does not depend on the kubelet's version is marked, and tried with the newest.

    So is what a release is too old for.
    """
    known = [item for item in items if not _newer(item)]
    only = {"one_kubelet": max(KUBELETS), "oldest_kubelet": min(KUBELETS)}
    items[:] = [
        item
        for item in known
        if all(
            isinstance(item, pytest.Function) and item.callspec.params["cluster"] == kubelet
            for marker, kubelet in only.items()
            if item.get_closest_marker(marker)
        )
    ]
    items.sort(key=lambda item: LONGEST_FIRST.index(scope(item.nodeid)))


def _newer(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("since")
    since = marker.args[0] if marker else "1.34" if scope(item.nodeid) == "DRA" else ""
    return bool(since > RELEASE)


def scope(nodeid: str) -> str:
    """The tests that share a cluster, and so a worker of xdist."""
    module, _, test = nodeid.partition("::")
    for folder, name in FOLDERS.items():
        if folder in module:
            return name
    if any(name in module for name in ABOUT_THE_API):
        return "API server"
    return next((kubelet for kubelet in KUBELETS if kubelet in test), max(KUBELETS))


class OneClusterEach(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Tests that share a cluster go to one worker of xdist."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneClusterEach:
    """Not --dist=loadgroup: xdist 3.8 passes groups on in names that pytest 9.2 does not take."""
    return OneClusterEach(config, log)


@pytest.fixture(scope="session", params=sorted(KUBELETS, reverse=True))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of one node with two Warboys, and the images of the agent and of a workload."""
    with started("warboy=2", agent(), workload(), kubelet=request.param) as running:
        yield running


@pytest.fixture(scope="session")
def node(cluster: Cluster) -> Node:
    """The cluster's node, with the agent on it."""
    running = Node(cluster)
    running.deploy()
    return running


@pytest.fixture
def token(node: Node) -> str:
    """The token that the kubelet has given the agent's Pod."""
    return node.in_agent("cat", f"{SECRETS}/token")


@pytest.fixture
def tidy(node: Node) -> Callable[[], None]:
    """Does away with what a test has left."""
    return node.delete_pods


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest, node: Node, tidy: Callable[[], None]) -> Iterator[None]:
    """Each test starts and ends without workloads; a failure shows what the agent logged."""
    yield
    if request.node.stash.get(FAILED, False):
        print(node.story(), file=sys.stderr)
    tidy()


@pytest.fixture
def kill(node: Node) -> Iterator[Callable[[int], None]]:
    """Kills a card; all that were killed are well again before `clean` looks at them."""
    killed: set[int] = set()

    def kill(card: int) -> None:
        killed.add(card)
        node.fault("dead", f"npu{card}")

    yield kill
    node.fault("ok", *(f"npu{card}" for card in killed))


@pytest.fixture
def repaired(node: Node) -> Iterator[None]:
    """Both cards are offered before and after; what a test did to cards and config is undone."""
    node.wait_allocatable(2)
    yield
    node.delete_pods()
    node.fault("ok", "npu0", "npu1")
    node.configure("{}")
    node.wait_allocatable(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report
