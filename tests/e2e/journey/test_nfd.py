"""Node Feature Discovery's own chart with our values, then the agent where it has labelled a Node.

Its programs are of its release. They run in the workload's image, as there is no image of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.build import NFD, ensure_binaries
from tests.e2e.journey.reader import Reader
from tests.e2e.journey.steps import K8S, Journey
from tests.e2e.manifests import RESOURCE, WORKLOAD, thing
from tests.k8s.tools import objects, output

NAMESPACE = "node-feature-discovery"
LABEL = "feature.node.kubernetes.io/pci-1ed2.present"
VALUES = K8S / "examples" / "nfd-values.yaml"


@pytest.fixture
def tainted(bare: Journey) -> Iterator[Journey]:
    """The master runs, and the Node has our taint before a worker is there."""
    node = bare
    for card in (node.cluster.host_root / "sys/bus/pci/devices").iterdir():
        # Every device has them; NFD skips one without.
        for name in ("subsystem_vendor", "subsystem_device"):
            (card / name).write_text("0x0000\n", encoding="utf-8")
    node.label({"npu-agent/enabled": None})
    node.apply(thing("Namespace", NAMESPACE, namespace=""))
    node.apply(chart(node, "--include-crds", "--set", "worker.enable=false"))
    node.rolled_out("deployment/nfd-node-feature-discovery-master", NAMESPACE)
    taint = f"{RESOURCE}=present:NoSchedule"
    node.kubectl("taint", "node", node.name, taint)
    yield node
    node.kubectl("taint", "node", node.name, f"{taint}-")
    node.kubectl("delete", "namespace", NAMESPACE)
    node.label({LABEL: None, "npu-agent/enabled": "true"})


def chart(node: Journey, *arguments: str) -> list[dict[str, Any]]:
    """The objects of NFD's chart with our values; its programs are mounted from this machine."""
    built = ensure_binaries(NFD)
    template = ("template", "nfd", built["node-feature-discovery"], "--values", VALUES)
    only = ("--namespace", NAMESPACE, "--no-hooks", "--set", "gc.enable=false")
    made = objects(output("helm", *template, *only, *arguments))
    for workload in made:
        if workload["kind"] in ("DaemonSet", "Deployment"):
            run_here(node, workload["spec"]["template"]["spec"], built["nfd-worker"].parent)
    return made


def run_here(node: Journey, pod: dict[str, Any], programs: Path) -> None:
    """Its program of this machine, and the simulated /sys where this build of it reads."""
    (container,) = pod["containers"]
    container["image"] = WORKLOAD
    container["command"] = [f"/nfd/{container['command'][0]}"]
    container["securityContext"]["runAsUser"] = 65534
    container["volumeMounts"].append({"name": "nfd", "mountPath": "/nfd"})
    pod["volumes"].append({"name": "nfd", "hostPath": {"path": str(programs)}})
    for volume in pod["volumes"]:
        if volume["name"] == "host-sys":
            volume["hostPath"]["path"] = f"{node.cluster.host_root}/sys"
    for mount in container["volumeMounts"]:
        if mount["name"] == "host-sys":
            mount["mountPath"] = "/sys"


def test_a_node_that_was_tainted_from_birth_gets_its_label_and_the_agent(
    tainted: Journey, tmp_path: Path
) -> None:
    node = tainted
    node.apply(chart(node))
    node.wait_equal("NFD's label", lambda: node.labels().get(LABEL), "true")

    reader = Reader(node, tmp_path)
    (install,) = reader.blocks("docs/scheduling.md", "With Node Feature Discovery")
    reader.types(install)
    try:
        node.rolled_out()
        node.wait_allocatable(2)
        reader.check()
    finally:
        node.helm("uninstall", "npu-agent", "--namespace", "kube-system", "--wait")
    node.wait_allocatable(0)
    node.clear_labels()
    node.wait_clean()
