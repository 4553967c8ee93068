"""A cluster of its own for the journey of docs/install.md: what is applied is what users apply.

So that the files of k8s/ work here to the letter, a registry has the images by the names of the
pages, and the API server itself leads the agent's Pods to the simulated /sys (the node's /dev is
simulated already). Nothing is installed at first; each test starts from that, or says what it
builds on.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npu_agent import __version__
from tests.cluster import Cluster, agent, workload
from tests.cluster.images import scheduler
from tests.e2e.journey.registry import Registry
from tests.e2e.journey.steps import BUSYBOX, Journey
from tests.e2e.journey.vendors import STAND_IN
from tests.e2e.node import started


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node, with an image for the Pods of tests and none of those of the pages."""
    # A kubelet that has pulled with a password wants it for the same image by any other name, too:
    # also for the one that test_cards.py loads.
    config = {"syncFrequency": "1s", "imagePullCredentialsVerificationPolicy": "NeverVerify"}
    with started("warboy=2", workload(), name="npu-journey", kubelet_config=config) as running:
        yield running


@pytest.fixture(scope="package")
def registry(cluster: Cluster) -> Registry:
    """The registries, with each image of the pages."""
    made = Registry(cluster)
    made.push(agent(), f"npu-agent:{__version__}")
    made.push(agent(), STAND_IN.removeprefix("docker.io/"))
    made.push(workload(BUSYBOX), "library/busybox:1.37.0")
    made.push(scheduler(), scheduler().name.removeprefix("registry.k8s.io/"))
    return made


@pytest.fixture(scope="package")
def node(cluster: Cluster, registry: Registry) -> Journey:
    """The cluster's node with two simulated Warboy cards, and nothing of ours installed."""
    registry.ask_for_a_password(False)
    running = Journey(cluster)
    running.lead_to_simulated_sys()
    return running


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
