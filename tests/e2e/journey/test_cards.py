"""Simulated cards in a real cluster: the quick start for kind, and what docs/platforms.md promises.

The node has the agent's image by its plain name, as `kind load` leaves it. The cards of the other
tests have no part in this: the agent's own container has a driver tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_agent import __version__
from tests.cluster import agent
from tests.cluster.settings import CONTAINERD_SOCKET
from tests.docs.pages import page
from tests.e2e.doctor import wait_well
from tests.e2e.journey.reader import Reader
from tests.e2e.journey.steps import CHART, Journey
from tests.e2e.node import NAMESPACE, PROJECT
from tests.e2e.test_main_road import card_nodes

PLATFORMS = "docs/platforms.md"
PODS = "docs/pods.md"
NAMES = ("furiosa.ai/rngd: 1", "beta.furiosa.ai/npu: 1")
IMAGE = f"docker.io/library/npu-agent:{__version__}"
LABEL = "npu-agent/simulated"
EXAMPLE = str(PROJECT / "docs/examples/dra/one-card.yaml")
RELEASED = ("npu-agent", "--namespace", NAMESPACE)


@pytest.fixture
def loaded(bare: Journey) -> Iterator[Journey]:
    """The node with the image loaded, no label that would lead an agent there, and no agent."""
    node = bare
    node.cluster.import_image(agent().archive)
    node.tag(agent().name, IMAGE)
    node.label({"npu-agent/enabled": None})
    yield node
    node.helm("uninstall", *RELEASED, "--ignore-not-found", "--wait")
    node.delete_pods()
    node.kubectl("delete", "--ignore-not-found", "--filename", EXAMPLE)
    node.kubectl("delete", "resourceslices", "--all")
    node.clear_labels()
    node.label({LABEL: None, "npu-agent/enabled": "true"})
    node.clear_disk()
    ctr = ("ctr", "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", "images", "rm")
    node.cluster.enter(*ctr, "--sync", IMAGE, agent().name)


def loads(node: Journey) -> list[bool]:
    """Whether each card has load, as the agent's page says."""
    return [any(core["utilization"] for core in card["reading"]["cores"]) for card in node.cards()]


def test_the_quick_start(loaded: Journey, tmp_path: Path) -> None:
    node = loaded
    reader = Reader(node, tmp_path)
    start, faults, claims = reader.blocks(PLATFORMS, "kind")
    assert "NPU_DEVNAME=npu" in reader.types(start)

    assert loads(node) == [False, False], "no Pod has them"
    node.run("both", 2)
    assert node.nodes_in("both") == card_nodes(0) | card_nodes(1)
    node.wait_equal("load where a Pod is", lambda: loads(node), [True, True])
    node.wait_equal("the label", lambda: node.labels().get(LABEL), "true")
    assert 'simulated="true"' in node.page("/metrics")
    assert "the cards are simulated" in node.page("/")
    assert all(card["simulated"] for card in node.cards())
    assert "simulated: none" in node.in_agent("npu-agent", "info")
    wait_well(node)
    reader.types(faults)
    node.delete_pods()

    assert "NPU_DEVNAME=npu" in reader.types(claims)
    reader.check()


def test_the_pods_of_the_page(loaded: Journey) -> None:
    """docs/pods.md: by both names that it says to write."""
    node = loaded
    config = {"resources": [{"name": "furiosa.ai/rngd", "family": "rngd"}]}
    values = {"simulate": "warboy=1,rngd=1", "config": config}
    node.helm("install", *RELEASED, CHART[0], "--set-json", json.dumps(values), "--wait")
    node.wait_allocatable(1)
    node.wait_allocatable(1, resource="furiosa.ai/rngd")
    ((_, manifest),) = page(PODS).below("Ask by a resource name")
    node.apply(manifest)
    node.apply(manifest.replace("with-rngd", "with-npu").replace(*NAMES))
    assert "NPU_DEVNAME=npu1pe0-3,npu1pe4-7" in node.finished("with-rngd")
    assert "NPU_DEVNAME=npu0pe0-1" in node.finished("with-npu")
