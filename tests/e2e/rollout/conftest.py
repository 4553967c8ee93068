"""A cluster of its own, whose kubelet has the default settings: it syncs a Pod once a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster, agent, workload
from tests.e2e.dra.claims import devices
from tests.e2e.dra.conftest import OVERLAY
from tests.e2e.manifests import ONE, template
from tests.e2e.node import SOON, Node, started

CARDS = 32
"""Of each family: more than there are Pods at a time, so that no Pod waits for a card."""
CONFIG = {"resources": [{"name": "furiosa.ai/rngd", "family": "rngd", "api": "dra"}]}
"""By default the Warboys are the device plugin's, as `RESOURCE`."""
DEFAULTS = {"nodeStatusUpdateFrequency": "10s", "nodeStatusReportFrequency": "5m"}
"""What settings.py makes quicker than a kubelet does it by default."""


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node with many cards."""
    images, cards = (agent(), workload()), f"warboy={CARDS},rngd={CARDS}"
    with started(cards, *images, name="npu-rollout", kubelet_config=DEFAULTS) as running:
        yield running


@pytest.fixture(scope="package")
def node(cluster: Cluster) -> Node:
    """The cluster's node, whose Warboys are the device plugin's and whose RNGD are DRA's."""
    running = Node(cluster)
    running.deploy(CONFIG, OVERLAY)
    cluster.apply(template(ONE))
    running.wait_allocatable(CARDS, 2 * SOON)
    running.wait_equal("the devices", lambda: len(devices(running)), CARDS, 2 * SOON)
    return running
