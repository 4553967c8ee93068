"""The commands of README.md and of the pages that lead through an installation, as they stand.

The images are in a registry, and the node has none of them by another name. tests/docs/typed.py
says which test types what.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from npu_agent import __version__
from tests.docs.pages import page
from tests.e2e.api import configured
from tests.e2e.doctor import wait_well
from tests.e2e.journey.reader import Reader
from tests.e2e.journey.registry import PRIVATE, Registry
from tests.e2e.journey.steps import Journey
from tests.e2e.node import NAMESPACE, OURS, PROJECT, SOON

INSTALL, DRA = "docs/install.md", "docs/dra.md"
PLATFORMS, SCHEDULING = "docs/platforms.md", "docs/scheduling.md"
MOVING = "Move a node to DRA and back"
IMAGE = f"{PRIVATE}/npu-agent:{__version__}"
COUNT = "beta.furiosa.ai/npu.count"
OWN = "npu-system"


@pytest.fixture
def reader(bare: Journey, registry: Registry, tmp_path: Path) -> Iterator[Reader]:
    """A reader with a cluster whose node has the image no more, and nothing is installed."""
    registry.forget()
    node = bare
    found = Reader(node, tmp_path)
    yield found
    registry.ask_for_a_password(False)
    for namespace in (NAMESPACE, OWN):
        node.helm("uninstall", "npu-agent", "--namespace", namespace, "--ignore-not-found")
        node.kubectl(
            "delete", "secret", "my-registry", "--ignore-not-found", "--namespace", namespace
        )
    if found.overlay.exists():
        overlay = str(found.overlay.parent)
        node.kubectl("delete", "--ignore-not-found", "--kustomize", overlay)
    node.uninstall()
    node.delete_pods()
    node.clear_labels()
    node.clear_disk()


def serves(node: Journey, namespace: str = NAMESPACE) -> None:
    """Waits until the agent of this namespace, of the registry's image, offers both cards."""
    node.rolled_out(namespace=namespace)
    for pod in node.objects("pod", namespace, labelSelector=OURS):
        assert pod["spec"]["containers"][0]["image"] == IMAGE
    node.wait_allocatable(2)


def test_the_readme(reader: Reader) -> None:
    node = reader.node
    chart, one_file, overlay = reader.blocks("README.md", "Install")
    node.label({"npu-agent/enabled": None})
    reader.types(chart)
    serves(node)
    node.helm("uninstall", "npu-agent", "--namespace", NAMESPACE, "--wait")
    node.wait_allocatable(0)

    reader.types(one_file)
    serves(node)
    node.uninstall()
    node.wait_allocatable(0)
    node.clear_labels()
    node.clear_disk()
    node.wait_clean()

    reader.blocks(INSTALL, "Three ways to install")
    reader.types(overlay)
    serves(node, OWN)
    reader.check()


def test_from_the_image_and_away_again(reader: Reader) -> None:
    node = reader.node
    reader.types(reader.blocks("README.md", "Install")[0])
    serves(node)
    (after,) = reader.blocks(INSTALL, "Three ways to install")
    assert "NPU_DEVNAME=npu" in reader.types(after)
    (count,) = reader.blocks(PLATFORMS, "Count the NPUs")
    assert reader.types(count).split()[-2:] == [node.name, "2"]
    (where,) = reader.blocks(SCHEDULING, "Which nodes")
    assert reader.types(where).split("\n")[1].split()[:4] == ["npu-agent", "1", "1", "1"]

    (packs,) = reader.blocks(SCHEDULING, "Bin packing")
    (taints,) = reader.blocks(SCHEDULING, "Nodes for NPU Pods only")
    reader.types(packs)
    node.component("binpack-scheduler", "delete")
    node.wait_equal("the count", lambda: node.labels().get(COUNT), "2")
    reader.types(taints)

    verify, doctor = reader.blocks(INSTALL, "Verify")
    assert "9 device nodes, each one opens for reading and writing" in reader.types(verify)
    wait_well(node)
    reader.types(doctor)

    away, all_nodes, one_node, disk, resource = reader.blocks(INSTALL, "Uninstall")
    reader.types(away)
    node.wait_allocatable(0)
    node.label({"furiosa.ai/own": "1"})
    reader.types(one_node)
    assert not ours(node)
    node.label({COUNT: "2", "furiosa.ai/npu.count": "2", "alpha.furiosa.ai/npu.family": "a"})
    reader.types(all_nodes)
    assert not ours(node)
    reader.types(all_nodes)  # where there are none
    reader.types(disk)
    node.wait_clean()
    reader.types(resource)
    reader.check()


def ours(node: Journey) -> set[str]:
    """The keys of the Node's labels that are the agent's."""
    return {key for key in node.labels() if "furiosa.ai/" in key}


def refused(node: Journey, namespace: str = NAMESPACE) -> None:
    """Waits until the registry has refused the agent's image."""

    def waits() -> bool:
        (pod,) = node.objects("pod", namespace, labelSelector=OURS)
        waiting = pod["status"]["containerStatuses"][0]["state"]["waiting"]
        assert waiting["reason"] in ("ErrImagePull", "ImagePullBackOff"), waiting
        return True

    node.wait_for("the registry to refuse", waits)


def verified(reader: Reader, namespace: str = NAMESPACE) -> None:
    """Runs the verify Job, which pulls the image with the agent's own secret."""
    verify, _ = reader.blocks(INSTALL, "Verify")
    assert "each one opens" in reader.types(verify.replace(NAMESPACE, namespace))


def test_a_password_with_helm(reader: Reader, registry: Registry) -> None:
    registry.ask_for_a_password(True)
    reader.types("\n".join(reader.blocks(INSTALL, "A registry that needs a password")))
    reader.types("\n".join(reader.blocks(INSTALL, "The Secret with Helm")))
    serves(reader.node)
    registry.forget()
    verified(reader)
    registry.forget()
    tested = reader.node.helm("test", "npu-agent", "--namespace", NAMESPACE, "--logs")
    assert "Succeeded" in tested
    assert "each one opens" in tested  # with --logs
    reader.check()


def test_a_password_with_kustomize(reader: Reader, registry: Registry) -> None:
    registry.ask_for_a_password(True)
    reader.blocks(INSTALL, "Three ways to install")
    (typed,) = reader.blocks(INSTALL, "The Secret with kustomize")
    apply, _, secret = typed.partition("\n")
    reader.types(apply)
    refused(reader.node, OWN)
    reader.types(secret)
    serves(reader.node, OWN)
    registry.forget()
    verified(reader, OWN)
    reader.check()


def test_a_password_with_one_file(reader: Reader, registry: Registry) -> None:
    registry.ask_for_a_password(True)
    reader.types("\n".join(reader.blocks(INSTALL, "A registry that needs a password")))
    (typed,) = reader.blocks(INSTALL, "The Secret with one file")
    apply, _, account = typed.partition("\n")
    reader.types(apply)
    refused(reader.node)
    reader.types(account)
    serves(reader.node)
    registry.forget()
    verified(reader)
    reader.check()


def test_claims_and_away_again(reader: Reader) -> None:
    node = reader.node
    reader.types(reader.blocks("README.md", "Install")[0])
    serves(node)
    upgrade, look = reader.blocks(DRA, "Enable DRA")
    reader.types(upgrade)
    node.rolled_out()
    assert node.agent_pods()[0]["spec"]["containers"][0]["image"] == IMAGE
    node.wait_for("slices", lambda: node.objects("resourceslice"), 2 * SOON)
    assert "NPU_DEVNAME=npu0pe0-1" in reader.types(look)
    node.delete_pods()
    example = str(PROJECT / "docs/examples/dra/one-card.yaml")
    node.kubectl("delete", "--ignore-not-found", "--filename", example)
    reader.types(reader.blocks(INSTALL, "Uninstall")[0])
    (away,) = reader.blocks(DRA, "Remove DRA")
    reader.types(away)
    assert not node.objects("resourceslice")
    reader.check()


def test_moving_a_node(reader: Reader) -> None:
    node = reader.node
    reader.blocks(INSTALL, "Three ways to install")
    reader.blocks(DRA, "Enable DRA")
    (move,) = reader.blocks(DRA, MOVING)
    kustomization = yaml.safe_load(reader.overlay.read_text(encoding="utf-8"))

    def configure(config: str) -> None:
        patches = {"patches": configured(config, "", "")["patches"]}
        reader.overlay.write_text(yaml.safe_dump(kustomization | patches), encoding="utf-8")

    configure("allocation: {api: device-plugin}")
    reader.types("kubectl apply -k ../my-cluster/")
    serves(node, OWN)
    lines, _ = page(DRA).below(MOVING)
    configure(lines[1].replace("NODE", node.name))
    reader.types(move, namespace=OWN)

    def offered() -> int:
        (only,) = node.objects("resourceslice")
        return len(only["spec"]["devices"])

    node.wait_equal("cards in the slice", offered, 2)
    configure("allocation: {api: device-plugin}")
    reader.types("kubectl apply -k ../my-cluster/")
    node.kubectl("rollout", "restart", "daemonset/npu-agent", "--namespace", OWN)
    node.wait_allocatable(2, 4 * SOON)
    reader.check()
