"""A cluster of its own for the journey of docs/install.md: what is applied is what users apply.

So that the files of k8s/ work here to the letter, the images have the names that they ask for, and
the API server itself leads the agent's Pods to the simulated /sys (the node's /dev is simulated
already). Nothing is installed at first; each test starts from that, or says what it builds on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, agent, workload
from tests.cluster.images import scheduler
from tests.e2e.journey.steps import BUSYBOX, RELEASE, Journey
from tests.e2e.node import IMAGE, WORKLOAD, simulated


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node that has all the images."""
    workdir = Path(tempfile.mkdtemp(prefix="npu-e2e-", dir="/tmp"))
    # Its Node's name is its own: another cluster may run beside it.
    with Cluster.start(
        workdir, node_name="npu-journey", kubelet_config={"syncFrequency": "1s"}
    ) as running:
        for image in (agent(), workload(), scheduler()):
            running.import_image(image.archive)
        yield running


@pytest.fixture(scope="package")
def node(cluster: Cluster) -> Iterator[Journey]:
    """The cluster's node with two simulated Warboy cards, and nothing of ours installed."""
    with simulated(cluster, "warboy=2"):
        running = Journey(cluster)
        running.tag(IMAGE, RELEASE)
        running.tag(WORKLOAD, BUSYBOX)
        running.lead_to_simulated_sys()
        yield running


@pytest.fixture
def installed(node: Journey) -> Journey:
    """The node with the agent on it, as `kubectl apply -f k8s/npu-agent.yaml` leaves it."""
    node.install()
    return node


@pytest.fixture
def bare(node: Journey) -> Journey:
    """The node without the agent."""
    node.uninstall()
    return node
