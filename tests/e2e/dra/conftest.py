"""A cluster of its own, whose node offers two Warboys and six RNGD by DRA."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster import Cluster, agent, workload
from tests.e2e.api import ADMIN
from tests.e2e.conftest import REPORT
from tests.e2e.dra.claims import CONFIG, ONE, devices, prepared, specs, template
from tests.e2e.node import PROJECT, SOON, Node, simulated

OVERLAY = "tests/e2e/dra"
CLASSES = PROJECT / "k8s" / "components" / "dra-classes" / "deviceclasses.yaml"
CARDS = 8


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node, with the images of the agent and of a workload."""
    workdir = Path(tempfile.mkdtemp(prefix="npu-e2e-", dir="/tmp"))
    # Its Node's name is its own: another cluster may run beside it.
    with Cluster.start(
        workdir, node_name="npu-dra", kubelet_config={"syncFrequency": "1s"}
    ) as running:
        for image in (agent(), workload()):
            running.import_image(image.archive)
        yield running


@pytest.fixture(scope="package")
def node(cluster: Cluster) -> Iterator[Node]:
    """The cluster's node, with npu0 and npu1 a Warboy each and npu2 to npu7 RNGD."""
    with simulated(cluster, "warboy=2,rngd=6"):
        running = Node(cluster)
        running.deploy(CONFIG, OVERLAY)
        cluster.apply(template(ONE))
        published(running)
        yield running


def published(node: Node) -> None:
    """Waits until all cards are offered, without taints."""

    def untainted() -> bool:
        found = devices(node)
        assert sorted(found) == list(range(CARDS)), found
        return not any(one.get("taints") for one in found.values())

    node.cluster.wait_for("all cards to be published", untainted, 2 * SOON)


@pytest.fixture(scope="module")
def classes(node: Node) -> Iterator[None]:
    """The DeviceClasses of the component dra-classes are there."""
    made = list(yaml.safe_load_all(CLASSES.read_text()))
    node.cluster.apply(made)
    yield
    node.cluster.kubectl("delete", "deviceclass", *(one["metadata"]["name"] for one in made))


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest, node: Node) -> Iterator[None]:
    """Each test starts and ends without workloads, and leaves nothing prepared."""
    yield
    failed = request.node.stash.get(REPORT, None)
    if failed:
        print(node.story(), file=sys.stderr)
    node.delete_pods()
    # They outlive their Pods, and the next scenario may have Pods of the same names. In one
    # request: kubectl makes one for each, five in a second, and a long scenario leaves hundreds.
    events = node.cluster.request("DELETE", "/api/v1/namespaces/default/events", token=ADMIN)
    assert events.status == 200, events
    node.cluster.kubectl("delete", "resourceclaims", "--all", "--namespace", "default")
    # A template cannot be changed: the next test may have another one of that name.
    but_one = f"--field-selector=metadata.name!={ONE}"
    node.cluster.kubectl("delete", "resourceclaimtemplates", but_one, "--namespace", "default")
    unprepared(node)
    published(node)


def unprepared(node: Node) -> None:
    """Waits until no claim is prepared on the node, and nothing is left of one."""

    def nothing() -> bool:
        assert not prepared(node), prepared(node)
        assert not specs(node), specs(node)
        return True

    node.cluster.wait_for("all claims to be unprepared", nothing, SOON)


@pytest.fixture
def kill(node: Node) -> Iterator[Callable[[int], None]]:
    """Kills a card; all that were killed are well again before `clean` looks at them."""
    killed: set[int] = set()

    def kill(card: int) -> None:
        killed.add(card)
        node.fault(f"npu{card}", "dead")

    yield kill
    for card in killed:
        node.fault(f"npu{card}", "ok")
