"""Stand-ins of the vendor's programs, installed as the vendor's are: three charts, or manifests.

Names, labels, places and behaviour are those of the vendor's; what runs is `second.py`, in the
agent's image. The other two programs only sleep: what they leave on a Node the test does itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.journey.second import READY
from tests.e2e.journey.steps import Journey
from tests.e2e.manifests import WORKLOAD, thing

CHARTS = ("furiosa-feature-discovery", "furiosa-device-plugin", "furiosa-metrics-exporter")
MANIFESTS = {
    "device-plugin": "furiosa-device-plugin",
    "npu-feature-discovery": "furiosa-npu-feature-discovery",
    "npu-metrics-exporter": "furiosa-npu-metrics-exporter",
}
"""The vendor's files, and the DaemonSet in each."""
STAND_IN = "docker.io/library/stand-in:1"
"""The image of what runs, in the public registry."""
SECOND = Path(__file__).with_name("second.py")
PLUGINS = "/var/lib/kubelet/device-plugins"


def charts(directory: Path, resource: str, devices: list[str]) -> None:
    """Writes the three charts where `helm install furiosa/…` finds them if run in `directory`."""
    for name in CHARTS:
        chart = directory / "furiosa" / name
        (chart / "templates").mkdir(parents=True)
        about = {"apiVersion": "v2", "name": name, "version": "2025.3.0"}
        (chart / "Chart.yaml").write_text(json.dumps(about), encoding="utf-8")
        (chart / "values.yaml").write_text(
            "{config: {partitioning: none, debugMode: false}}", encoding="utf-8"
        )
        where = "feature.node.kubernetes.io/pci-1200_1ed2.present"
        for kind, made in _objects(name, resource, devices, where).items():
            (chart / "templates" / f"{kind}.yaml").write_text(json.dumps(made), encoding="utf-8")


def manifests(directory: Path, resource: str, devices: list[str], config: str) -> None:
    """Writes the three manifests of SDK 0.8 to 0.10."""
    where = "feature.node.kubernetes.io/pci-1ed2.present"
    for file, name in MANIFESTS.items():
        things = list(_objects(name, resource, devices, where).values())
        if file == "device-plugin":
            things.append(thing("ConfigMap", "npu-device-plugin", data={"config.yaml": config}))
        for one in things:
            one["metadata"]["namespace"] = "kube-system"
        everything = {"apiVersion": "v1", "kind": "List", "items": things}
        (directory / f"{file}.yaml").write_text(json.dumps(everything), encoding="utf-8")


def _objects(name: str, resource: str, devices: list[str], where: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": 1,
        "priorityClassName": "system-node-critical",
        "nodeSelector": {where: "true"},
        "containers": [{"name": name, "image": WORKLOAD, "imagePullPolicy": "Never"}],
    }
    found: dict[str, Any] = {}
    if name == "furiosa-device-plugin":
        socket = resource.partition("/")[2] + ".sock"
        hosts = {"kubelet": (PLUGINS, PLUGINS), "dev": ("/dev", "/host/dev")}
        program = f"{name}-stand-in"
        spec["containers"][0] |= {
            "image": STAND_IN,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python3", "/stand-in/second.py"],
            "args": [PLUGINS, resource, socket, *devices],
            "readinessProbe": {"exec": {"command": ["test", "-e", str(READY)]}, "periodSeconds": 1},
            "volumeMounts": [
                *({"name": one, "mountPath": inside} for one, (_, inside) in hosts.items()),
                {"name": "stand-in", "mountPath": "/stand-in"},
            ],
        }
        spec["volumes"] = [
            *({"name": one, "hostPath": {"path": host}} for one, (host, _) in hosts.items()),
            {"name": "stand-in", "configMap": {"name": program}},
        ]
        found["program"] = thing(
            "ConfigMap",
            program,
            namespace="",
            data={"second.py": SECOND.read_text(encoding="utf-8")},
        )
    if name.endswith("metrics-exporter"):
        ports = [{"name": "metrics", "port": 6254}]
        found["service"] = thing(
            "Service", name, namespace="", spec={"selector": labels, "ports": ports}
        )
        found["service"]["metadata"]["annotations"] = {"prometheus.io/scrape": "true"}
    template = {"metadata": {"labels": labels}, "spec": spec}
    whole = {"selector": {"matchLabels": labels}, "template": template}
    found["daemonset"] = thing("DaemonSet", name, "apps/v1", namespace="", spec=whole)
    found["daemonset"]["metadata"]["labels"] = labels
    return found


def cards(node: Journey) -> dict[str, str]:
    """The UUID of each simulated card, by its name."""
    found = (node.cluster.host_root / "sys" / "class" / "npu_mgmt").glob("npu*_mgmt")
    return {
        path.name.removesuffix("_mgmt"): (path / "device_uuid").read_text(encoding="utf-8").strip()
        for path in sorted(found)
    }
