"""Simulated cards in a real cluster: the quick start for kind, and what docs/platforms.md promises.

The node has the agent's image by its plain name, as `kind load` leaves it. The cards of the other
tests have no part in this: the agent's own container has a driver tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from npu_agent import __version__
from tests.cluster import ClusterError, agent
from tests.cluster.settings import CONTAINERD_SOCKET
from tests.docs.pages import page
from tests.e2e.api import overlay
from tests.e2e.doctor import wait_well
from tests.e2e.journey.reader import Reader
from tests.e2e.journey.steps import CHART, Journey
from tests.e2e.manifests import thing
from tests.e2e.node import NAMESPACE, PROJECT

PLATFORMS = "docs/platforms.md"
PODS = "docs/pods.md"
NAMES = ("furiosa.ai/rngd: 1", "beta.furiosa.ai/npu: 1")
IMAGE = f"docker.io/library/npu-agent:{__version__}"
LABEL = "npu-agent/simulated"
EXAMPLE = str(PROJECT / "docs/examples/dra/one-card.yaml")
WARBOY = ("", "_mgmt", "ch0", "ch1", "ch2", "ch3", "pe0", "pe1", "pe0-1")
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


def nodes_of(*cards: str) -> set[str]:
    """The device nodes of Warboys."""
    return {f"/dev/{card}{rest}" for card in cards for rest in WARBOY}


def test_the_quick_start(loaded: Journey, tmp_path: Path) -> None:
    node = loaded
    reader = Reader(node, tmp_path)
    start, faults, claims = reader.blocks(PLATFORMS, "kind")
    assert "NPU_DEVNAME=npu" in reader.types(start)

    node.run("both", 2)
    assert node.nodes_in("both") == nodes_of("npu0", "npu1")
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


def test_by_the_component_with_other_cards(loaded: Journey, tmp_path: Path) -> None:
    node = loaded
    variable = {"name": "SIMULATE", "value": "rngd=1,warboy=1"}
    spec = {"template": {"spec": {"containers": [{"name": "npu-agent", "env": [variable]}]}}}
    patch = thing("DaemonSet", "npu-agent", "apps/v1", namespace="", spec=spec)
    node.apply(overlay(node, tmp_path, "simulate", patches=[{"patch": yaml.safe_dump(patch)}]))
    try:
        node.rolled_out()
        node.wait_allocatable(2)
        node.run("both", 2)
        found = node.nodes_in("both")
        assert nodes_of("npu1") < found
        assert "/dev/rngd/npu0pe0" in found
    finally:
        node.kubectl("delete", "--ignore-not-found", "--kustomize", str(tmp_path))


def test_the_pods_of_the_page(loaded: Journey) -> None:
    """docs/pods.md: by both names that it says to write, and by claim as its example has it."""
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

    ((_, claim),) = page(PODS).below("Ask by claim")
    example = (PROJECT / "docs/examples/dra/one-card.yaml").read_text()
    assert list(yaml.safe_load_all(claim)) == list(yaml.safe_load_all(example))


def test_not_on_a_node_with_real_cards(loaded: Journey) -> None:
    """The container has the /sys of the other tests' cards for its own: that of a real driver."""
    node = loaded
    sys = f"{node.cluster.host_root}/sys"
    values = {
        "simulate": "warboy=1",
        "extraVolumes": [{"name": "real", "hostPath": {"path": sys}}],
        "extraVolumeMounts": [{"name": "real", "mountPath": "/sys", "readOnly": True}],
    }
    node.helm("install", *RELEASED, CHART[0], "--set-json", json.dumps(values))

    def refused() -> bool:
        said = node.log()
        assert "this node has real cards (npu0, npu1, 0000:01:00.0" in said, said
        assert f"kubectl label node {node.name} npu-agent/enabled=false" in said
        return True

    node.wait_for("the agent to refuse", refused)
    assert node.allocatable() in (None, 0)
    assert LABEL not in node.labels()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wrboy=2", 'simulate has the family "wrboy", and there are warboy and rngd'),
        ("warboy=65", "simulate asks for 65 cards, and a node has 64 at most"),
    ],
)
def test_a_wrong_list_is_refused_at_install(loaded: Journey, value: str, message: str) -> None:
    node = loaded
    with pytest.raises(ClusterError, match="INSTALLATION FAILED") as refusal:
        node.helm("install", *RELEASED, CHART[0], "--set", f"simulate={value}")
    assert message in str(refusal.value)
