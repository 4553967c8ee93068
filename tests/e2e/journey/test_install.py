"""Installed in each of the three ways, at work with every component, and gone without a trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import ClusterError
from tests.e2e.journey.steps import AGENT, CHART, K8S, LEFT_ON_DISK, Journey
from tests.e2e.node import SOON

COUNT = "beta.furiosa.ai/npu.count"
RELEASED = ("npu-agent", "--namespace", "kube-system")
PARTS = (
    *("own-namespace", "nodes-label", "cdi", "nfd-output", "recursive-read-only", "selinux"),
    *("network-policy", "podmonitor", "alerts", "dashboard"),
)
SCHEDULING = (
    *("binpack-scheduler", "scheduler-name-fill", "scheduler-name-refuse", "scheduler-name-opa"),
)
FEATURES, SPEC = LEFT_ON_DISK[2], LEFT_ON_DISK[1]


def labelled(node: Journey) -> bool:
    """Whether the Node says how many NPUs it has."""
    return bool(node.cluster.get("node", node.name)["metadata"]["labels"].get(COUNT) == "2")


def test_the_rendered_file_installs_and_goes(bare: Journey) -> None:
    node = bare
    node.install()
    npus = r"custom-columns=NODE:.metadata.name,NPUS:.status.allocatable.beta\.furiosa\.ai/npu"
    assert node.cluster.kubectl("get", "nodes", "-o", npus).split()[2:] == [node.name, "2"]
    node.run("one", 1)
    assert node.environment("one", "NPU_DEVNAME") in ("npu0pe0-1", "npu1pe0-1")
    node.cluster.wait_for("the Node's labels", lambda: labelled(node), SOON)
    node.wait_known("one")
    node.delete_pods("one")
    node.wait_unused()

    node.uninstall()
    # Labels outlive the agent, and the kubelet keeps its resource, of which there is none.
    node.wait_allocatable(0)
    assert labelled(node)
    node.clear_labels()
    node.wait_clean()


def test_the_chart_installs_follows_values_and_goes(bare: Journey) -> None:
    node = bare
    node.helm("install", *RELEASED, *CHART, "--wait")
    try:
        node.wait_allocatable(2)
        (before,) = node.agent_pods()
        tested = node.helm("test", *RELEASED, "--logs", "--timeout", "90s")
        assert "Succeeded" in tested
        assert "npu0pe0-1" in tested or "npu1pe0-1" in tested

        node.helm("upgrade", *RELEASED, *CHART, "--set", "config.defaultPe=Single")
        node.wait_allocatable(4)
        (after,) = node.agent_pods()
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        assert after["status"]["containerStatuses"][0]["restartCount"] == 0
        node.run("half", 1)
        assert node.environment("half", "NPU_DEVNAME")[4:] in ("pe0", "pe1")
        node.wait_known("half")
        node.delete_pods("half")
        node.wait_unused()
    finally:
        node.helm("uninstall", *RELEASED, "--wait")
    node.wait_allocatable(0)
    node.clear_labels()
    node.wait_clean()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("config.defaultPe=Triple", "at '/config/defaultPe': value must be one of 'Fusion', 'Sin"),
        ("config.defaultPE=Single", "at '/config': additional properties 'defaultPE' not allowed"),
        ("nodez=every", "at '': additional properties 'nodez' not allowed"),
        ("config.allocation.method=cdi", "set cdi to true as well"),
    ],
)
def test_the_chart_refuses_a_wrong_value(bare: Journey, value: str, message: str) -> None:
    with pytest.raises(ClusterError, match="INSTALLATION FAILED") as refusal:
        bare.helm("install", *RELEASED, *CHART, "--set", value)
    assert message in str(refusal.value)
    assert "objects" not in bare.left_behind()


def test_the_example_pod_shows_what_it_was_given(installed: Journey) -> None:
    with installed.components("example-pod"):
        printed = installed.finished("npu-example")
    assert "NPU_DEVNAME=npu" in printed
    assert "FURIOSA_DEVICES=npu:" in printed
    assert {line.split()[-1] for line in printed.splitlines()} >= {"npu0_mgmt", "npu0pe0-1"}


def test_with_every_component_a_pod_gets_its_npu(bare: Journey, tmp_path: Path) -> None:
    node = bare
    prometheus_operator(node)
    node.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "opa"}})
    config = {"allocation": {"method": "cdi"}, "labels": {"output": "nfd"}}
    overlay(tmp_path, namespace="npu-system", config=config)
    node.cluster.kubectl("apply", "--kustomize", str(tmp_path))
    try:
        node.rolled_out(namespace="npu-system")
        node.wait_allocatable(2)
        with node.components(*SCHEDULING):
            node.rolled_out("deployment/npu-binpack-scheduler")
            with node.components("example-pod"):
                assert "NPU_DEVNAME=npu" in node.finished("npu-example")
                scheduler = node.pod("npu-example")["spec"]["schedulerName"]
            node.run("holds", 1)
        assert scheduler == "npu-binpack-scheduler"
        assert {FEATURES, SPEC} <= node.files()
    finally:
        node.cluster.kubectl("delete", "--kustomize", str(tmp_path))
    node.wait_allocatable(0)
    # A Pod that runs on needs its CDI spec if its container is started again.
    assert node.files() == set(LEFT_ON_DISK)
    node.delete_pods("holds")
    node.clear_labels()  # none, as NFD would have set them; those of earlier tests
    node.clear_disk()
    node.wait_clean()


def prometheus_operator(node: Journey) -> None:
    """What the cluster knows of Prometheus Operator: that there are such objects."""
    names = {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    group = "monitoring.coreos.com"
    for kind, plural in names.items():
        version: dict[str, Any] = {"name": "v1", "served": True, "storage": True}
        definition = {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [version | {"schema": {"openAPIV3Schema": schema}}],
        }
        node.cluster.apply(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}"},
                "spec": definition,
            }
        )
        established = ("--for=condition=Established", "--timeout=30s", f"crd/{plural}.{group}")
        node.cluster.kubectl("wait", *established)


def overlay(directory: Path, *, namespace: str, config: dict[str, Any]) -> None:
    """Writes the kustomization of somebody who wants all the parts."""
    base = os.path.relpath(K8S, directory.resolve())
    patch = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "npu-device-plugin"},
        "data": {"config.yaml": yaml.safe_dump(config)},
    }
    kustomization = {
        "namespace": namespace,
        "resources": [base],
        "components": [f"{base}/components/{part}" for part in PARTS],
        "images": [{"name": "npu-agent", "newName": AGENT}],
        "patches": [{"patch": yaml.safe_dump(patch)}],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
