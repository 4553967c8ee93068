"""Whether OpenShift admits our Pods, judged by its own admission code (tests/k8s/openshift)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.build import ensure_own

from .test_chart import template
from .tools import CHART, Object, objects, output

SOURCE = Path(__file__).parent / "openshift"
ROLLING = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def reasons_against(pod: Object, scc: Object) -> list[str]:
    """What OpenShift has against this Pod under this SecurityContextConstraints."""
    done = subprocess.run(
        [ensure_own(SOURCE)],
        input=json.dumps({"scc": scc, "pod": pod}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def made(**values: Any) -> tuple[Object, Object]:
    """The agent's Pod and the SecurityContextConstraints that the chart makes."""
    things = {t["kind"]: t for t in template({"openshift": True, **values}, "npu-system")}
    pod = things["DaemonSet"]["spec"]["template"]
    return {"apiVersion": "v1", "kind": "Pod", **pod}, things["SecurityContextConstraints"]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dra": {"enabled": True}, "cdi": True, "nfdOutput": True, "metricsTLS": True},
        {"hostNetwork": True, "updateStrategy": ROLLING},
    ],
    ids=["default", "everything", "hostNetwork"],
)
def test_the_agent_is_admitted(values: Object) -> None:
    assert reasons_against(*made(**values)) == []


def test_the_pod_of_helm_test_is_admitted() -> None:
    words = ("--set", "openshift=true", "--show-only", "templates/tests/verify.yaml")
    (pod,) = objects(output("helm", "template", "x", CHART, *words))
    assert reasons_against(pod, made()[1]) == []


@pytest.mark.parametrize(
    ("less", "reason"),
    [
        ({"allowHostDirVolumePlugin": False}, "hostPath volumes are not allowed to be used"),
        ({"volumes": ["configMap", "emptyDir"]}, "projected volumes are not allowed to be used"),
        ({"runAsUser": {"type": "MustRunAsRange"}}, "0: must be in the ranges: [1000700000, 10007"),
        ({"runAsUser": {"type": "MustRunAsNonRoot"}}, "running with the root UID is forbidden"),
        ({"seLinuxContext": {"type": "MustRunAs"}}, "seLinuxOptions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_agent_is_refused_with_less(less: Object, reason: str) -> None:
    pod, scc = made()
    found = reasons_against(pod, scc | less)
    assert any(reason in each for each in found), found


def test_a_privileged_pod_is_refused() -> None:
    pod, scc = made()
    pod["spec"]["containers"][0]["securityContext"]["privileged"] = True
    assert any(
        "Privileged containers are not allowed" in each for each in reasons_against(pod, scc)
    )
