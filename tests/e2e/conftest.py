"""A real node with simulated cards and the agent deployed from k8s/, for each kubelet."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.cluster import KUBELETS, Cluster, agent, workload
from tests.e2e.node import Node, simulated

REPORT = pytest.StashKey[str]()
ABOUT_THE_API = (
    "/test_dra_examples.py",
    "/test_dra_policy.py",
    "/test_dra_slices.py",
    "/test_labels.py",
    "/test_policy.py",
)


def pytest_configure() -> None:
    if os.geteuid() != 0:
        pytest.exit("the e2e tests start a real Kubernetes and need root: sudo make e2e", 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What does not depend on the kubelet's version is marked, and tried beside the newest."""
    only = {"one_kubelet": max(KUBELETS), "oldest_kubelet": min(KUBELETS)}
    items[:] = [
        item
        for item in items
        if all(
            isinstance(item, pytest.Function) and item.callspec.params["cluster"] == kubelet
            for marker, kubelet in only.items()
            if item.get_closest_marker(marker)
        )
    ]


class OneClusterEach(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Tests that share a cluster go to one worker of xdist. There are six clusters.

    One for each kubelet, one for what is about the API server, which would make the newest
    kubelet's by far the longest, and one each for the journey, for DRA and for rollouts, which have
    their own.
    """

    def _split_scope(self, nodeid: str) -> str:
        module, _, test = nodeid.partition("::")
        if "/journey/" in module:
            return "journey"
        if "/dra/" in module:
            return "DRA"
        if "/rollout/" in module:
            return "rollout"
        if module.endswith(ABOUT_THE_API):
            return "API server"
        return next(kubelet for kubelet in KUBELETS if kubelet in test)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneClusterEach:
    """Not --dist=loadgroup: xdist 3.8 passes groups on in names that pytest 9.2 does not take."""
    return OneClusterEach(config, log)


@pytest.fixture(scope="session", params=sorted(KUBELETS, reverse=True))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of one node, with the images of the agent and of a workload."""
    # Short, as the plugin's socket is below it: a unix socket's path has 107 bytes at most.
    workdir = Path(tempfile.mkdtemp(prefix="npu-e2e-", dir="/tmp"))
    # The kubelet brings an edited ConfigMap into a Pod at its next sync: not once a minute here.
    with Cluster.start(workdir, request.param, kubelet_config={"syncFrequency": "1s"}) as running:
        for image in (agent(), workload()):
            running.import_image(image.archive)
        yield running


@pytest.fixture(scope="session")
def node(cluster: Cluster) -> Iterator[Node]:
    """The cluster's node with two simulated Warboy cards and the agent on it."""
    with simulated(cluster, "warboy=2"):
        running = Node(cluster)
        running.deploy({"defaultPe": "Fusion"})
        yield running


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest, node: Node) -> Iterator[None]:
    """Each test starts and ends without workloads; a failure shows what the agent said."""
    yield
    failed = request.node.stash.get(REPORT, None)
    if failed:
        print(node.story(), file=sys.stderr)
    node.delete_pods()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed:
        item.stash[REPORT] = report.longreprtext
    return report
