"""A cluster of its own, whose node offers two Warboys and six RNGD by DRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import yaml

from tests.cluster import Cluster, agent, workload
from tests.e2e.api import ADMIN
from tests.e2e.dra.claims import CONFIG, devices, prepared, specs
from tests.e2e.manifests import ONE, template
from tests.e2e.node import PROJECT, SOON, Node, started

OVERLAY = "tests/e2e/dra"
CLASSES = PROJECT / "k8s" / "components" / "dra-classes" / "deviceclasses.yaml"
CARDS = 8


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A cluster of one node; npu0 and npu1 are a Warboy each, and npu2 to npu7 RNGD."""
    with started("warboy=2,rngd=6", agent(), workload(), name="npu-dra") as running:
        yield running


@pytest.fixture(scope="package")
def node(cluster: Cluster) -> Node:
    """The cluster's node, with the agent on it."""
    running = Node(cluster)
    running.deploy(CONFIG, OVERLAY)
    cluster.apply(template(ONE))
    published(running)
    return running


def published(node: Node) -> None:
    """Waits until all cards are offered, without taints."""

    def untainted() -> bool:
        found = devices(node)
        assert sorted(found) == list(range(CARDS)), found
        return not any(one.get("taints") for one in found.values())

    node.wait_for("all cards to be published", untainted, 2 * SOON)


@pytest.fixture(scope="module")
def classes(node: Node) -> Iterator[None]:
    """The DeviceClasses of the component dra-classes are there."""
    made = list(yaml.safe_load_all(CLASSES.read_text(encoding="utf-8")))
    node.apply(made)
    yield
    node.kubectl("delete", "deviceclass", *(one["metadata"]["name"] for one in made))


@pytest.fixture
def tidy(node: Node) -> Callable[[], None]:
    """Leaves no workloads and nothing prepared."""

    def tidy() -> None:
        node.delete_pods()
        # They outlive their Pods, and the next scenario may have Pods of the same names. In one
        # request: kubectl makes one for each, five in a second, and a long scenario leaves hundreds
        events = node.cluster.request("DELETE", "/api/v1/namespaces/default/events", token=ADMIN)
        assert events.status == 200, events
        node.kubectl("delete", "resourceclaims", "--all", "--namespace", "default")
        # A template cannot be changed: the next test may have another one of that name.
        but_one = f"--field-selector=metadata.name!={ONE}"
        node.kubectl("delete", "resourceclaimtemplates", but_one, "--namespace", "default")
        unprepared(node)
        published(node)

    return tidy


def unprepared(node: Node, *but: str) -> None:
    """Waits until no claim but those of these names is prepared on the node."""
    wanted = {f"default/{name}" for name in but}
    node.wait_equal("all other claims to be unprepared", lambda: prepared(node), wanted)
    node.wait_equal("their specs to be removed", lambda: len(specs(node)), len(but))
