"""Which Pods are agents."""

from __future__ import annotations

import pytest

from npu_agent.people.cluster.objects import DaemonSet, Pod
from tests.people.cluster.build import AGENT, Json, read

OWNER = {"kind": "DaemonSet", "uid": "ours", "controller": True}


@pytest.mark.parametrize(
    ("metadata", "account", "ours"),
    [
        ({}, "npu-agent", True),
        ({"ownerReferences": []}, "npu-agent", False),
        ({"ownerReferences": [OWNER | {"uid": "theirs"}]}, "npu-agent", False),
        ({"namespace": "a-tenant"}, "npu-agent", False),
        ({}, "default", False),
    ],
    ids=["an agent", "no owner", "another owner", "another namespace", "another account"],
)
def test_the_agents_label_alone_makes_no_pod_an_agent(
    metadata: Json, account: str, ours: bool
) -> None:
    spec = {"serviceAccountName": "npu-agent"}
    meta = {"name": "npu-agent", "namespace": "kube-system", "uid": "ours"}
    agents = read(DaemonSet, {"metadata": meta, "spec": {"template": {"spec": spec}}})
    made = {"name": "p", "namespace": "kube-system", "labels": AGENT, "ownerReferences": [OWNER]}
    pod = read(Pod, {"metadata": made | metadata, "spec": {"serviceAccountName": account}})
    assert agents.runs(pod) is ours
