"""The chart of a release, and every component: installed, at work, and gone without a trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from npu_agent import __version__
from tests.cluster import ClusterError
from tests.cluster.build import HELM, HELM_3, GoBuild, ensure_binaries
from tests.e2e.api import configured
from tests.e2e.journey.registry import CHARTS
from tests.e2e.journey.steps import AGENT, CHART, LEFT_ON_DISK, Journey
from tests.e2e.manifests import custom_resource, thing
from tests.e2e.node import PROJECT
from tests.k8s.tools import overlay

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


@pytest.mark.parametrize("build", [HELM, HELM_3], ids=lambda build: build.name)
def test_the_chart_of_a_release_is_installed_follows_values_and_goes(
    bare: Journey, build: GoBuild, tmp_path: Path
) -> None:
    """Made by `make chart`, pushed, and installed by its address: no file of the chart is here."""
    node = bare
    make = (
        "make",
        "--silent",
        "chart",
        f"HELM={ensure_binaries(build)['helm']}",
        f"DIST={tmp_path}",
    )
    subprocess.run(make, cwd=PROJECT, check=True, capture_output=True)
    archive = tmp_path / f"npu-agent-{__version__}.tgz"
    node.helm("push", str(archive), CHARTS, "--plain-http", build=build)
    archive.unlink()
    chart = (f"{CHARTS}/npu-agent", "--version", __version__, "--plain-http")
    released = (*chart, "--set", f"image.repository={AGENT}")
    node.helm("install", *RELEASED, *released, "--wait", build=build)
    try:
        node.wait_allocatable(2)
        before = node.agent_run()
        assert "Succeeded" in node.helm("test", *RELEASED, "--timeout", "90s", build=build)

        node.helm("upgrade", *RELEASED, *released, "--set", "config.defaultPe=Single", build=build)
        node.wait_allocatable(4)
        assert node.agent_run() == before
        node.run("half", 1)
        assert node.environment("half", "NPU_DEVNAME")[4:] in ("pe0", "pe1")
        node.wait_known("half")
        node.delete_pods("half")
        node.wait_equal("held NPUs", node.held, {})

        node.helm("rollback", *RELEASED, "--wait", build=build)
        node.wait_allocatable(2)
        assert node.agent_run() == before
    finally:
        node.helm("uninstall", *RELEASED, "--wait", build=build)
    # Labels outlive the agent, and the kubelet keeps its resource, of which there is none.
    node.wait_allocatable(0)
    assert COUNT in node.labels()
    node.clear_labels()
    node.wait_clean()


def test_two_releases_share_the_device_classes(bare: Journey) -> None:
    """As the chart's README says of two agents in one cluster; the real Node is the second's."""
    node = bare
    node.label({"pool": "b"})
    dra = ("--set", "dra.enabled=true,dra.classes=true,nodes=every")
    second = ("npu-agent-b", "--namespace", "kube-system")
    theirs = (*CHART, *dra, "--set", "nameOverride=npu-agent-b,nodeSelector.pool=b")
    node.helm("install", *RELEASED, *CHART, *dra, "--set", "nodeSelector.pool=a")
    try:
        with pytest.raises(ClusterError, match=r"set dra\.deviceClasses to false"):
            node.helm("install", *second, *theirs)
        node.helm("install", *second, *theirs, "--set", "dra.deviceClasses=false")
        node.rolled_out("daemonset/npu-agent-b")
        node.wait_for("slices", lambda: node.objects("resourceslice"), 60)
        (line,) = kubectl_npu(node).splitlines()[1:]
        assert line.split()[0] == node.name
        assert __version__ in line
        node.helm("uninstall", *second, "--wait")
        # The first release's classes stay, and so do its rights.
        assert node.kubectl("get", "deviceclass", "npu.furiosa.ai")
    finally:
        for release in (second, RELEASED):
            node.helm("uninstall", *release, "--wait", "--ignore-not-found")
        node.label({"pool": None})
        node.kubectl("delete", "resourceslices", "--all")
    node.wait_allocatable(0)
    node.clear_labels()
    node.clear_disk()
    node.wait_clean()


def kubectl_npu(node: Journey) -> str:
    """What `kubectl npu` prints."""
    return node.cluster.enter(str(Path(sys.executable).with_name("kubectl-npu"))).stdout


def test_with_every_component_a_pod_gets_its_npu(bare: Journey, tmp_path: Path) -> None:
    node = bare
    # What the cluster knows of Prometheus Operator.
    kinds = ("PodMonitor", "PrometheusRule")
    node.apply([custom_resource(kind, "monitoring.coreos.com") for kind in kinds])
    node.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=30s")
    node.apply(thing("Namespace", "opa", namespace=""))
    config = {"allocation": {"method": "cdi"}, "labels": {"output": "nfd"}}
    overlay(tmp_path, PARTS, namespace="npu-system", **configured(config, AGENT, __version__))
    node.kubectl("apply", "--kustomize", str(tmp_path))
    try:
        node.rolled_out(namespace="npu-system")
        node.wait_allocatable(2)
        with node.components(*SCHEDULING):
            node.rolled_out("deployment/npu-binpack-scheduler")
            with node.components("example-pod"):
                printed = node.finished("npu-example")
                scheduler = node.pod("npu-example")["spec"]["schedulerName"]
            node.run("holds", 1)
        assert "NPU_DEVNAME=npu" in printed
        assert "FURIOSA_DEVICES=npu:" in printed
        assert {line.split()[-1] for line in printed.splitlines()} >= {"npu0_mgmt", "npu0pe0-1"}
        assert scheduler == "npu-binpack-scheduler"
        assert {FEATURES, SPEC} <= node.files()
    finally:
        node.kubectl("delete", "--kustomize", str(tmp_path))
    node.wait_allocatable(0)
    # A Pod that runs on needs its CDI spec if its container is started again.
    assert node.files() == set(LEFT_ON_DISK)
    node.delete_pods("holds")
    node.clear_labels()  # none, as NFD would have set them; those of earlier tests
    node.clear_disk()
    node.wait_clean()
