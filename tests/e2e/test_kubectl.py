"""`kubectl npu` on a real cluster whose node offers its cards by the device plugin."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
import yaml

from tests.e2e.manifests import WORKLOAD, container, npu_pod
from tests.e2e.node import AGENT, NAMESPACE, PROJECT, Node

pytestmark = pytest.mark.one_kubelet
PLUGIN = Path(sys.executable).with_name("kubectl-npu")
VERIFIER = PROJECT / "k8s/examples/npu-verify.yaml"
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
    things = list(yaml.safe_load_all(VIEWER.read_text(encoding="utf-8")))
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


def left(node: Node) -> str:
    """What `kubectl npu verify` makes, as far as it is there."""
    return " ".join(_left(node))


def _left(node: Node) -> list[str]:
    of_pods = ("get", "pods,resourceclaims,resourceclaimtemplates", "--all-namespaces")
    named = node.kubectl(*of_pods, "--output=name").splitlines()
    classes = node.kubectl("get", "priorityclasses", "--output=name").splitlines()
    return [name for name in (*named, *classes) if "npu-verify" in name]


def verify(node: Node, *words: str) -> list[dict[str, str]]:
    """Its rows; the exit code is 1 where one says so, and all is as it was before."""
    before = left(node)
    done = npu(node, "verify", *words, "-o", "json", check=False)
    rows: list[dict[str, str]] = json.loads(done.stdout)
    assert done.returncode == any(row["result"] == "failed" for row in rows), done
    node.wait_equal("nothing to be left", lambda: left(node), before)
    return rows


def test_a_node_is_verified_on_a_card_that_is_free(node: Node) -> None:
    (row,) = verify(node, "--all")
    assert (row["node"], row["result"]) == (node.name, "passed"), row
    node.run("holds", 1)
    held = node.environment("holds", "NPU_DEVNAME")[:4]
    # A Node that is cordoned, as after an update of its driver.
    node.kubectl("cordon", node.name)
    (row,) = verify(node, node.name)
    assert (row["card"], row["result"]) == ("npu1" if held == "npu0" else "npu0", "passed"), row
    node.kubectl("uncordon", node.name)
    node.run("holds-too", 1)
    (row,) = verify(node, "--all")
    assert row["result"] == "skipped"
    assert row["finding"] == "no card is free: default/holds, default/holds-too"
    assert npu(node, "verify", node.name, check=False).returncode == 1, "it was named"


_DRIVER = """
import os, signal, subprocess, sys
command = subprocess.Popen(sys.argv[1:], start_new_session=True)
if sys.stdin.readline():
    os.killpg(command.pid, signal.SIGINT)
sys.exit(command.wait())
"""
"""Sends Ctrl-C as a terminal does, to kubectl as well, when it is sent a line."""


@contextlib.contextmanager
def verifying(node: Node) -> Iterator[subprocess.Popen[str]]:
    """It goes on: the Node has no such profile. Ends when its Pod has a card."""
    words = ("verify", "--all", "--seccomp=missing.json", "--timeout=120", "--no-headers")
    command = node.cluster.command(sys.executable, "-c", _DRIVER, str(PLUGIN), *words)
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as running:
        try:
            node.wait_for("its Pod to have a card", lambda: "npu-verify" in "".join(node.held()))
            yield running
        finally:
            running.kill()


def test_a_job_gets_the_card_from_a_pod_that_verifies(node: Node) -> None:
    node.run("holds", 1)
    with verifying(node) as running:
        node.run("job", 1)
        output, _ = running.communicate("", timeout=60)
    assert running.returncode == 0
    assert output.split()[:3] == [node.name, "-", "skipped"]
    assert "a Pod with a higher priority got the card" in output
    assert left(node) == ""


def test_ctrl_c_leaves_nothing(node: Node) -> None:
    with verifying(node) as running:
        said = running.communicate("now\n", timeout=60)
    assert running.returncode == 130, said
    node.wait_equal("nothing to be left", lambda: left(node), "")


def test_without_rights_the_command_names_them_and_who_has_them(node: Node, viewer: str) -> None:
    refused = npu(node, "verify", "--all", "--as", viewer, check=False)
    assert refused.returncode == 1
    assert 'cannot create resource "pods"' in refused.stderr
    assert "k8s/examples/npu-verify.yaml" in refused.stderr
    node.kubectl("apply", "-f", str(VERIFIER))
    bind = ("create", "rolebinding", "verifier", "--clusterrole=npu-verify", f"--user={viewer}")
    node.kubectl("--namespace=kube-system", *bind)
    (row,) = verify(node, "--all", "--as", viewer)
    assert row["result"] == "passed"
    node.kubectl("--namespace=kube-system", "delete", "rolebinding", "verifier")
    node.kubectl("delete", "-f", str(VERIFIER))


@pytest.fixture
def blue(node: Node) -> Iterator[str]:
    """The agent as a release of another name, behind a mesh's container; the resource it serves.

    The name of the resource is of another domain than the vendor's.
    """
    resource = "example.com/npu"
    daemon_set = json.loads(node.kubectl("get", *AGENT, "--output=json"))
    node.configure({"resourceName": resource})
    name = {"app.kubernetes.io/name": "npu-blue"}
    meta = {"name": "npu-blue", "namespace": NAMESPACE, "labels": daemon_set["metadata"]["labels"]}
    spec = daemon_set["spec"]
    pod = spec["template"]
    # As in manifests, without what the API server fills in: this one's port comes first.
    mesh = container("proxy", image=WORKLOAD, ports=[{"containerPort": 15090}])
    pod["spec"]["containers"].insert(0, mesh)
    for labels in (meta["labels"], pod["metadata"]["labels"], spec["selector"]["matchLabels"]):
        labels.update(name)
    node.kubectl("delete", *AGENT)
    node.apply({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta, "spec": spec})
    node.wait_allocatable(2, 60.0, resource=resource)
    yield resource
    node.delete_pods()
    node.kubectl("delete", "daemonset/npu-blue", "--namespace", NAMESPACE)
    node.deploy()


def test_an_agent_of_another_name_behind_a_mesh_with_a_resource_of_another_domain(
    node: Node, blue: str
) -> None:
    def nodes() -> dict[str, str]:
        found = row(npu(node))
        assert (found["CARDS"], found["ALLOCATED"], found["AGENT"]) == ("2", "0", "test")
        return found

    assert node.wait_for("both cards in kubectl npu", nodes)["FREE"] == "4"
    node.apply(npu_pod("holds", resource=blue))
    node.wait_phase("holds", "Running")
    card = node.environment("holds", "NPU_DEVNAME")[:4]

    def held() -> bool:
        return row(npu(node, "pods"))["CARD"] == card

    node.wait_for("the holder in kubectl npu", held)
    assert row(npu(node))["ALLOCATED"] == "2"
    assert f"{blue}: {card}, cores 0-1" in npu(node, "why", "holds").stdout
    assert f"agent 0.1.0 on Node {node.name}, ready" in npu(node, "node", node.name).stdout
    dry = npu(node, "drain", node.name, card, "--dry-run")
    assert dry.stdout == "would evict default/holds\n"
    (verified,) = verify(node, "--all")
    assert verified["result"] == "passed", verified
    drained = npu(node, "drain", node.name, card, "--reason", "fan").stdout.splitlines()
    npu(node, "uncordon", node.name, card)
    assert drained[0] == f"{card} of Node {node.name} is cordoned: fan"
    assert "evicted default/holds" in drained
    assert drained[-1].startswith(f"{card} is free and can be reset")
