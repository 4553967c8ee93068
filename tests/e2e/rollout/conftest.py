"""A cluster of its own, whose kubelet has the default settings: it syncs a Pod once a minute."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, agent, workload
from tests.e2e.conftest import REPORT
from tests.e2e.dra.claims import ONE, devices, template
from tests.e2e.node import SOON, Node, simulated

OVERLAY = "tests/e2e/rollout"
CARDS = 32
"""Of each family: more than there are Pods at a time, so that no Pod waits for a card."""
CONFIG: dict[str, Any] = {
    "resources": [{"name": "furiosa.ai/rngd", "family": "rngd", "api": "dra"}],
}
"""By default the Warboys are the device plugin's, as `RESOURCE`."""
DEFAULTS = {"nodeStatusUpdateFrequency": "10s", "nodeStatusReportFrequency": "5m"}
"""What settings.py makes quicker than a kubelet does it by default."""


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node, with the images of the agent and of a workload."""
    workdir = Path(tempfile.mkdtemp(prefix="npu-e2e-", dir="/tmp"))
    with Cluster.start(workdir, node_name="npu-rollout", kubelet_config=DEFAULTS) as running:
        for image in (agent(), workload()):
            running.import_image(image.archive)
        yield running


@pytest.fixture(scope="package")
def node(cluster: Cluster) -> Iterator[Node]:
    """The cluster's node, whose Warboys are the device plugin's and whose RNGD are DRA's."""
    with simulated(cluster, f"warboy={CARDS},rngd={CARDS}"):
        running = Node(cluster)
        running.deploy(CONFIG, OVERLAY)
        cluster.apply(template(ONE))
        running.wait_allocatable(CARDS, 2 * SOON)
        cluster.wait_for("the slices", lambda: len(devices(running)) == CARDS, 2 * SOON)
        yield running


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest, node: Node) -> Iterator[None]:
    """Each test ends without workloads; a failure shows what the agent logged."""
    yield
    if request.node.stash.get(REPORT, None):
        print(node.story(), file=sys.stderr)
    node.delete_pods()
