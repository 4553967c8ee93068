"""docs/examples/pods on a real node: a checked Job, a Deployment, a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.manifests import IMAGE, RESOURCE, WORKLOAD, Thing, thing
from tests.e2e.node import PROJECT, SOON, Node

pytestmark = [pytest.mark.usefixtures("repaired"), pytest.mark.one_kubelet]
EXAMPLES = PROJECT / "docs" / "examples" / "pods"
DEFAULT = "--namespace=default"


@pytest.fixture(autouse=True)
def nothing_left(node: Node) -> Iterator[None]:
    yield
    node.kubectl("delete", "jobs,deployments,statefulsets", "--all", DEFAULT)
    node.delete_pods()
    node.kubectl("delete", "persistentvolumeclaims", "--all", DEFAULT)
    node.kubectl("delete", "persistentvolumes", "--all")


def example(name: str, **command: list[str]) -> tuple[Thing, Thing]:
    """An object of a file and the spec of its Pods, whose images are those that the node has."""
    object_ = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    spec = object_["spec"]["template"]["spec"]
    spec["terminationGracePeriodSeconds"] = 0
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        image = IMAGE if "npu-agent" in container["image"] else WORKLOAD
        container |= {"image": image, "imagePullPolicy": "Never"}
    spec["containers"][0] |= command
    object_["metadata"]["namespace"] = "default"
    return object_, spec


def pods(node: Node, label: str) -> list[dict[str, Any]]:
    return node.objects("pod", "default", labelSelector=label)


def ended(node: Node, job: str, condition: str) -> dict[str, Any]:
    """The only Pod of a Job that has this condition."""
    node.kubectl(
        "wait", f"--for=condition={condition}", f"job/{job}", "--timeout=60s", DEFAULT, timeout=90
    )
    (pod,) = pods(node, f"job-name={job}")
    return pod


def log(node: Node, pod: dict[str, Any], container: str) -> str:
    name = pod["metadata"]["name"]
    return str(node.kubectl("logs", name, f"--container={container}", DEFAULT))


def test_a_checked_job_verifies_the_card_that_its_container_gets(node: Node) -> None:
    job, _ = example("checked-job")
    node.apply(job)
    pod = ended(node, "checked-job", "Complete")
    verified = log(node, pod, "verify")
    assert "each one opens for reading and writing" in verified
    (names,) = (line for line in log(node, pod, "main").splitlines() if "NPU_DEVNAME" in line)
    assert names in verified


def test_a_checked_job_does_not_start_when_verify_finds_something_wrong(node: Node) -> None:
    job, spec = example("checked-job")
    spec["initContainers"][0]["args"] = ["verify", "--expect", "2"]
    job["spec"]["backoffLimit"] = 0
    node.apply(job)
    pod = ended(node, "checked-job", "Failed")
    assert "wrong" in log(node, pod, "verify")
    (main,) = pod["status"]["containerStatuses"]
    assert "running" not in main["state"]
    assert "startedAt" not in main["state"].get("terminated", {}), main
    assert main["started"] is False


def test_a_deployment_of_all_cards_is_rolled_out(node: Node) -> None:
    """Each old Pod ends before a new one starts, as no card is free."""
    deployment, _ = example("deployment", command=["sh", "-c", "exec sleep 100000"])
    rollout = ("rollout", "status", "deployment/npu-server", "--timeout=90s", DEFAULT)
    node.apply(deployment)
    node.kubectl(*rollout, timeout=2 * SOON + 90)
    before = {pod["metadata"]["name"] for pod in pods(node, "app=npu-server")}
    assert len(before) == node.allocatable(RESOURCE) == 2
    node.kubectl("rollout", "restart", "deployment/npu-server", DEFAULT)
    node.kubectl(*rollout, timeout=2 * SOON + 90)
    after = [
        pod["metadata"]["name"]
        for pod in pods(node, "app=npu-server")
        if "deletionTimestamp" not in pod["metadata"]
    ]
    assert len(after) == 2
    assert before.isdisjoint(after)


def test_a_notebook_has_its_card_and_its_files(node: Node) -> None:
    (claim,) = example("notebook")[0]["spec"]["volumeClaimTemplates"]
    wanted = claim["spec"]
    volume = {
        "capacity": wanted["resources"]["requests"],
        "accessModes": wanted["accessModes"],
        "hostPath": {"path": "/var/lib/notebook", "type": "DirectoryOrCreate"},
    }
    node.apply(thing("PersistentVolume", "notebook", namespace="", spec=volume))
    notebook, _ = example("notebook", command=["sh", "-c", "exec sleep 100000"])
    node.apply(notebook)
    node.wait_phase("notebook-0", "Running", 2 * SOON)
    assert node.nodes_in("notebook-0")
    node.cluster.exec("notebook-0", "sh", "-c", "echo kept > /work/file")
    node.delete_pods("notebook-0")
    node.wait_phase("notebook-0", "Running", 2 * SOON)
    assert node.cluster.exec("notebook-0", "cat", "/work/file") == "kept\n"
