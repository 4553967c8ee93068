"""`npu-agent verify` in a job's own Pod: what the runtime's seccomp profile takes, and what not."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

import pytest
import yaml

from tests.cluster import ClusterError
from tests.e2e.dra.claims import CONFIG
from tests.e2e.manifests import IMAGE, Thing, claim_pod, container, pod, request, template, thing
from tests.e2e.node import PROJECT, SOON, Node

PROFILE = PROJECT / "docs" / "examples" / "seccomp" / "npu.yaml"
RNGD = "one-of-rngd"
LOCALHOST = {"type": "Localhost", "localhostProfile": "operator/npu.json"}


@pytest.fixture(autouse=True)
def profile_on_the_node(node: Node) -> None:
    """As the security-profiles-operator writes a SeccompProfile: its spec is the runtime's form."""
    spec = yaml.safe_load(PROFILE.read_text(encoding="utf-8"))["spec"]
    path = node.cluster.host_root / "npu.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    node.cluster.enter("mkdir", "-p", "/var/lib/kubelet/seccomp/operator")
    node.cluster.enter("cp", str(path), "/var/lib/kubelet/seccomp/operator/npu.json")
    node.apply(template(RNGD, request(arch="rngd")))


def verifies(name: str, profile: Thing, **fields: Any) -> Thing:
    return claim_pod(
        name,
        of_template=RNGD,
        command="npu-agent verify -o json",
        securityContext={"seccompProfile": profile},
        **fields,
    )


def lines(node: Node, name: str, phase: str) -> dict[str, dict[str, str]]:
    node.wait_phase(name, phase, 2 * SOON)
    return {line["name"]: line for line in json.loads(node.cluster.logs(name))}


def exit_code(node: Node, name: str) -> int:
    (status,) = node.pod(name)["status"]["containerStatuses"]
    code: int = status["state"]["terminated"]["exitCode"]
    return code


def test_the_default_profile_takes_io_uring_away_and_verify_says_so(node: Node) -> None:
    node.apply(verifies("filtered", {"type": "RuntimeDefault"}))
    found = lines(node, "filtered", "Failed")
    wrong = {name: line for name, line in found.items() if line["state"] == "wrong"}
    assert list(wrong) == ["io_uring"]
    assert "filtered by the Pod's seccomp profile: io_uring_setup" in wrong["io_uring"]["detail"]
    assert "seccompProfile: {type: Unconfined}" in wrong["io_uring"]["remedy"]
    assert exit_code(node, "filtered") == 1


@pytest.mark.parametrize("profile", [{"type": "Unconfined"}, LOCALHOST], ids=lambda p: p["type"])
def test_a_job_can_run_without_that_profile_or_with_ours(node: Node, profile: Thing) -> None:
    name = profile["type"].lower()
    node.apply(verifies(name, profile))
    found = lines(node, name, "Succeeded")
    assert found["io_uring"]["state"] == "ok"
    assert found["environment"]["detail"].endswith(tuple(f"npu:{at}" for at in range(8)))
    assert exit_code(node, name) == 0


def test_a_pod_without_an_npu_says_what_verify_is_for(node: Node) -> None:
    node.apply(pod("none", container(image=IMAGE, command="npu-agent verify")))
    node.wait_phase("none", "Failed")
    assert exit_code(node, "none") == 2
    assert "put it into a Pod that requests an NPU" in node.cluster.logs("none")


def test_a_namespace_of_level_baseline_admits_our_profile_and_not_unconfined(node: Node) -> None:
    """By a real API server's Pod Security admission, as the table in docs/pods.md has it."""
    name = "at-baseline"
    label = {"pod-security.kubernetes.io/enforce": "baseline"}
    space = thing("Namespace", name, namespace="")
    space["metadata"]["labels"] = label
    node.apply(space)
    try:
        account = ("get", "serviceaccount", "default", "--namespace", name, "--output=name")
        node.wait_for("its account", lambda: node.kubectl(*account))
        with pytest.raises(ClusterError, match="seccompProfile"):
            node.apply(verifies("unconfined", {"type": "Unconfined"}, namespace=name))
        node.apply(verifies("ours", LOCALHOST, namespace=name))
    finally:
        node.kubectl("delete", "namespace", name, "--wait=false")


def test_a_node_of_the_host_comes_with_each_card_once_it_is_there(node: Node) -> None:
    """`containers.deviceNodes`, by an edit of the config while the agent runs."""
    heap = node.cluster.host_root / "dev/dma_heap/system"

    def missing() -> list[str]:
        status = json.loads(node.page("/status.json"))
        return [problem["kind"] for problem in status["problems"]]

    try:
        node.configure({**CONFIG, "containers": {"deviceNodes": ["/dev/dma_heap/system"]}})
        node.wait_equal("a problem", missing, ["HostNodeMissing"])
        node.apply(verifies("without", {"type": "Unconfined"}))
        assert lines(node, "without", "Succeeded")["/dev/dma_heap/system"]["state"] == "note"
        heap.parent.mkdir(exist_ok=True)
        os.mknod(heap, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        node.wait_equal("the problem's end", missing, [])
        node.apply(verifies("with", {"type": "Unconfined"}))
        assert lines(node, "with", "Succeeded")["/dev/dma_heap/system"]["state"] == "ok"
    finally:
        heap.unlink(missing_ok=True)
        node.configure(CONFIG)
