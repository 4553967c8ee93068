"""`kubectl npu` on a real cluster whose node offers its cards by the device plugin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.node import PROJECT, Node

pytestmark = pytest.mark.one_kubelet
PLUGIN = Path(sys.executable).with_name("kubectl-npu")
VIEWER = PROJECT / "k8s/examples/npu-viewer.yaml"


@pytest.fixture(autouse=True)
def _repaired(repaired: None) -> None:
    """What a test did to the cards is undone."""


def npu(node: Node, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs it with an administrator's kubeconfig."""
    done = node.cluster.enter(str(PLUGIN), *words, check=False)
    assert not check or done.returncode == 0, done
    print(f"$ kubectl npu {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done


def row(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The only row of a table, by its headings."""
    headings, cells = (line.split() for line in done.stdout.splitlines())
    return dict(zip(headings, cells, strict=True))


def test_a_pod_is_shown_with_its_card_and_one_that_waits_with_its_reason(node: Node) -> None:
    def nodes() -> dict[str, str]:
        found = row(npu(node))
        # The agent may have started while the test before brought a card back.
        assert (found["NODE"], found["CARDS"], found["HEALTHY"]) == (node.name, "2", "2")
        return found

    before = node.wait_for("both cards in kubectl npu", nodes)
    assert before["ALLOCATED"] == "0"
    node.run("holds", 1)
    card = node.environment("holds", "NPU_DEVNAME")[:4]
    node.wait_known("holds")
    held = row(npu(node, "pods"))
    assert (held["POD"], held["NODE"], held["CARD"]) == ("holds", node.name, card)
    assert row(npu(node))["FREE"] == str(int(before["CORES"]) // 2)
    assert row(npu(node, "top"))["POD"] == "holds"

    node.create("waits", 2)
    node.wait_unschedulable("waits")
    said = npu(node, "why", "waits").stdout
    assert "Pod default/waits is Pending." in said
    assert "Insufficient" in said.splitlines()[1]
    assert "default/holds" in said
    assert "waits" in npu(node, "pods", "-A").stdout


def test_kubectl_completes_it(node: Node) -> None:
    def complete(*words: str) -> list[str]:
        path = f"PATH={PLUGIN.parent}:{node.cluster._state.path}"
        return node.cluster.enter("env", path, "kubectl", "__complete", *words).stdout.splitlines()

    # It ends within 5 s, whatever is slow: then it offers nothing, and a person presses Tab again.
    names = [node.name, ":4"]
    node.wait_equal("Nodes", lambda: complete("furiosa-npu", "node", ""), names)
    cards = ["npu0", "npu1", ":4"]
    node.wait_equal("cards", lambda: complete("npu", "drain", node.name, ""), cards)


@pytest.fixture
def viewer(node: Node) -> Iterator[str]:
    """A user with the rights of the example, and no others."""
    things = list(yaml.safe_load_all(VIEWER.read_text()))
    (role,) = (one["metadata"]["name"] for one in things if one["kind"] == "ClusterRole")
    node.kubectl("apply", "-f", str(VIEWER))
    node.kubectl("create", "clusterrolebinding", "viewer", f"--clusterrole={role}", "--user=eve")
    yield "eve"
    node.kubectl("delete", "clusterrolebinding", "viewer")
    node.kubectl("delete", "-f", str(VIEWER))


def test_the_rights_of_the_example_are_enough_to_see_all_and_change_nothing(
    node: Node, viewer: str
) -> None:
    for words in ((), ("pods", "-A"), ("top", "-A"), ("node", node.name)):
        assert not npu(node, *words, "--as", viewer).stderr
    refused = npu(node, "cordon", node.name, "npu0", "--as", viewer, check=False)
    assert refused.returncode == 1
    assert "forbidden" in refused.stderr.lower()
