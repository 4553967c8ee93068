"""What `npu-agent doctor` tells people to type repairs the fault, and changes nothing else.

Installed as people do it who have an image and a config of their own, with DRA, by the chart and by
an overlay. Each fault is made, the doctor is asked, its command is run as it stands.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import agent
from tests.cluster.build import HELM, ensure_binaries
from tests.e2e.api import configured
from tests.e2e.doctor import Check, checks, wait_well
from tests.e2e.journey.registry import Registry
from tests.e2e.journey.steps import Journey
from tests.e2e.manifests import DRIVER
from tests.e2e.node import NAMESPACE, PROJECT, SOON
from tests.k8s.tools import overlay as render

REGISTRY = "registry.example.com/npu-agent"
OURS = {"interval": 7, "allocation": {"api": "auto"}}
"""The config; it differs from that of k8s/."""
POLICY = "npu-agent-own-slices"
ROLE = ("clusterrole", "npu-agent")
HERE = ("--namespace", NAMESPACE)


@dataclass(frozen=True)
class Installed:
    """How the agent was installed: what stands in the commands for things of the user's own."""

    node: Journey
    chart: bool
    overlay: Path
    path: str
    """With Helm in it."""

    def type(self, command: str) -> str:
        """Runs what people are told to type."""
        words = command.replace("OVERLAY", str(self.overlay))
        if not self.chart:
            assert "helm" not in command
        home = self.node.cluster.workdir / "run" / "helm"
        homes = [f"HELM_{what}_HOME={home}" for what in ("CACHE", "CONFIG", "DATA")]
        where = f"set -o pipefail; cd {shlex.quote(str(PROJECT))} && "
        return self.node.cluster.enter(
            *("env", *homes, f"PATH={self.path}", "bash", "-c", where + words), timeout=120
        ).stdout

    def state(self) -> dict[str, Any]:
        """What no remedy may change: image, config, account, rights, policies, classes."""
        objects: dict[str, tuple[str, ...]] = {
            "daemonset/npu-agent": ("spec", "template", "spec"),
            "configmap/npu-device-plugin": ("data",),
            "serviceaccount/npu-agent": ("automountServiceAccountToken",),
            "clusterrole/npu-agent": ("rules",),
            "clusterrole/npu-agent-dra": ("rules",),
            "clusterrolebinding/npu-agent": ("subjects",),
            "clusterrolebinding/npu-agent-dra": ("subjects",),
            f"validatingadmissionpolicy/{POLICY}": ("spec",),
            f"deviceclass/{DRIVER}": ("spec",),
        }
        got = self.node.kubectl("get", *objects, *HERE, "--output=json")
        found = {}
        for (name, path), thing in zip(objects.items(), json.loads(got)["items"], strict=True):
            part = functools.reduce(operator.getitem, path, thing)
            if name.startswith("daemonset"):  # in which order they come back does not matter
                for one in (*part["containers"][0].values(), part["volumes"]):
                    if isinstance(one, list) and isinstance(one[0], dict):
                        one.sort(key=json.dumps)
            found[name] = (part, thing["metadata"]["labels"])
        return found


@pytest.fixture(scope="module", params=["chart", "overlay"])
def installed(
    request: pytest.FixtureRequest,
    node: Journey,
    registry: Registry,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installed]:
    """The agent by the chart or by an overlay; another image and config than those of k8s/."""
    node.uninstall()
    registry.push(agent(), "npu-agent:v7")
    chart = request.param == "chart"
    overlay = tmp_path_factory.mktemp("overlay")
    render(overlay, ["dra"], namespace=NAMESPACE, **configured(OURS, REGISTRY, "v7"))
    programs = ensure_binaries(HELM)["helm"].parent
    made = Installed(node, chart, overlay, f"{programs}:{os.environ['PATH']}")
    if chart:
        made.type(
            f"helm install npu-agent k8s/chart --namespace {NAMESPACE} --wait "
            f"--set image.repository={REGISTRY} --set image.tag=v7 --set config.interval=7 "
            "--set dra.enabled=true --set commonLabels.team=one"
        )
    else:
        made.type("kubectl apply -k OVERLAY")
    node.rolled_out()
    wait_well(node)
    yield made
    if chart:
        made.type(f"helm uninstall npu-agent --namespace {NAMESPACE} --wait")
    else:
        made.type("kubectl delete --ignore-not-found -k OVERLAY")
    node.kubectl("delete", "resourceslices", "--all")
    node.clear_labels()
    node.clear_disk()


def rights_lost(node: Journey) -> None:
    """Those for Events, all of the role for DRA, and the binding."""
    less = [{"op": "remove", "path": "/rules/1"}]
    node.kubectl("patch", *ROLE, "--type=json", "--patch", json.dumps(less))
    node.kubectl("delete", "clusterrole", "npu-agent-dra")
    node.kubectl("delete", "clusterrolebinding", "npu-agent")


def edited(container: dict[str, Any]) -> Callable[[Journey], None]:
    """Somebody edits the DaemonSet."""

    def edit(node: Journey) -> None:
        spec = {"containers": [{"name": "npu-agent", **container}]}
        patch = json.dumps({"spec": {"template": {"spec": spec}}})
        node.kubectl("patch", "daemonset/npu-agent", *HERE, "--patch", patch)
        node.rolled_out()

    return edit


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with an installation, and the line that says what to do."""

    do: Callable[[Journey], object]
    line: str
    remedy: str = ""
    """What to find the command by in the remedy; empty: it is the line's own command."""


_NO_CGROUPS = {"mountPath": "/host/sys/fs/cgroup", "$patch": "delete"}
FAULTS = {
    "rights lost": Fault(rights_lost, "rights"),
    "account deleted": Fault(
        lambda node: node.kubectl("delete", "serviceaccount", "npu-agent", *HERE), "API server"
    ),
    "mount lost": Fault(edited({"volumeMounts": [_NO_CGROUPS]}), "cgroups"),
    "cordoned": Fault(
        lambda node: node.kubectl("cordon", node.name), "Node", r"kubectl uncordon \S+"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_remedy_repairs_the_fault_and_nothing_else(installed: Installed, name: str) -> None:
    fault, node = FAULTS[name], installed.node
    before = installed.state()
    fault.do(node)

    def seen() -> Check:
        found = checks(node)
        wrong = {one["name"] for one in found if one["state"] == "wrong"}
        if fault.line in ("rights", "API server"):
            # One item for all that is missing, and what the agent cannot do without it.
            own = {name for name in wrong if not name.startswith(("agent ", "readiness", "DRA "))}
            assert own == {fault.line}, wrong
        (one,) = [one for one in found if one["name"] == fault.line and one["remedy"]]
        return one

    line = node.wait_for(f"the line {fault.line}", seen, 2 * SOON)
    command = line["command"]
    if fault.remedy:
        found = re.search(fault.remedy, line["remedy"])
        assert found, line
        command = found[0]
    installed.type(command)
    node.rolled_out()

    def repaired() -> bool:
        assert installed.state() == before
        found = checks(node)
        remedies = [one for one in found if one["remedy"] and one["name"] == fault.line]
        bad = [one for one in found if one["state"] == "wrong"]
        assert not remedies + bad, remedies + bad
        return True

    node.wait_for("the fault to be repaired", repaired)


@pytest.mark.parametrize("installed", ["chart"], indirect=True)
def test_helm_upgrades_after_the_remedies(installed: Installed) -> None:
    """A field that a remedy has restored and that changes then is Helm's: there is no conflict."""
    for kind in ("clusterrole", "clusterrolebinding"):
        installed.node.kubectl("delete", kind, "npu-agent")
    (line,) = [one for one in checks(installed.node) if one["name"] == "rights"]
    installed.type(line["command"])
    installed.type(
        f"helm upgrade npu-agent k8s/chart --namespace {NAMESPACE} --reset-then-reuse-values "
        "--set commonLabels.team=two --wait"
    )
    labels = json.loads(installed.node.kubectl("get", *ROLE, "--output=json"))["metadata"]
    assert labels["labels"]["team"] == "two"
    wait_well(installed.node)
