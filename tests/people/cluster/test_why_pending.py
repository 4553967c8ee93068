"""The cases of the kubectl plugin why-pending, as objects: each is answered at least as well.

Those of its packages for claims, extended resources and the rest, at its release 0.5.
"""

from __future__ import annotations

from typing import Any

import pytest

from npu_agent.kube.objects import Pod
from npu_agent.people.cluster.why import Verdict, why
from tests.people.cluster.build import (
    Json,
    claim,
    claims,
    class_,
    cluster,
    node,
    pod,
    read,
    slice_,
    thing,
)

GPU = "nvidia.com/gpu"


def answer(asked: Json, *objects: Json) -> str:
    return text(why(read(Pod, asked), cluster(asked, *objects)))


def text(found: Verdict) -> str:
    nodes = [f"{each.node}: {each}" for each in found.nodes]
    return "\n".join([found.sentence, *found.details, *nodes])


def small(name: str, cpu: str = "4") -> Json:
    return node(name, {"cpu": cpu, "memory": "8Gi"})


def user(on: str, **requests: str) -> Json:
    return pod(f"user-{on}", requests, on=on)


CLAIMED: Json = pod(resourceClaims=claims(gpu="claim-1"))
TAINTED: dict[str, Any] = {
    "taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]
}
TOLERATION = {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}
TEMPLATE = pod(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "gpu-template"}])
VOLUME = [{"name": "data", "persistentVolumeClaim": {"claimName": "data-demo-0"}}]

CASES: dict[str, tuple[Json, list[Json], str]] = {
    "claim not found": (CLAIMED, [small("n1")], "ResourceClaim claim-1 does not exist"),
    "claim of another namespace": (
        CLAIMED,
        [{**claim("claim-1"), "metadata": {"name": "claim-1", "namespace": "other"}}, small("n1")],
        "ResourceClaim claim-1 does not exist in namespace ml",
    ),
    "class not found": (CLAIMED, [claim("claim-1"), small("n1")], "of ResourceClaim claim-1"),
    "no driver publishes": (
        CLAIMED,
        [claim("claim-1"), class_(), small("n1")],
        "offers no devices by DRA",
    ),
    "an empty slice": (
        CLAIMED,
        [claim("claim-1"), class_(), small("n1"), slice_("n1")],
        "offers no devices by DRA",
    ),
    "no claim made of the template": (TEMPLATE, [small("n1")], "gpu-template of its claim gpu"),
    "no node provides": (pod(requests={GPU: "1"}), [small("n1")], f"offers no {GPU}"),
    "insufficient": (
        pod(requests={GPU: "1"}),
        [node("g1", {GPU: "2"}), pod("a", {GPU: "2"}, on="g1")],
        "ml/a has 2",
    ),
    "fits": (
        pod(requests={GPU: "1"}),
        [node("g1", {GPU: "4"}), pod("a", {GPU: "1"}, on="g1")],
        "could be scheduled now, on g1",
    ),
    "an init container asks for the most": (
        pod(
            requests={"cpu": "750m"},
            initContainers=[{"name": "i", "resources": {"requests": {"cpu": "5"}}}],
        ),
        [small("n1")],
        "wants 5 cpu",
    ),
    "fragmentation": (
        pod(requests={"cpu": "2"}),
        [one for n in ("n1", "n2", "n3") for one in (small(n), user(n, cpu="3"))],
        "no Node has 2 together: it is fragmented",
    ),
    "larger than any node": (
        pod(requests={"cpu": "8"}),
        [small("n1"), small("n2")],
        "it asks for more than any Node has",
    ),
    "too little is free": (
        pod(requests={"cpu": "3"}),
        [one for n in ("n1", "n2") for one in (small(n), user(n, cpu="3500m"))],
        "too little is free",
    ),
    "a taint": (pod(), [node("cp", spec=TAINTED)], "has the taint node-role.kubernetes.io"),
    "a toleration": (
        pod(tolerations=[TOLERATION]),
        [node("cp", spec=TAINTED)],
        "could be scheduled now, on cp",
    ),
    "node selector": (
        pod(nodeSelector={"disktype": "ssd"}),
        [small("n1")],
        "lacks the label disktype=ssd",
    ),
    "unbound volume": (
        pod(volumes=VOLUME),
        [small("n1"), thing("PersistentVolumeClaim", "data-demo-0", "ml")],
        "PersistentVolumeClaim data-demo-0 is not bound",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_is_answered(name: str) -> None:
    asked, objects, wanted = CASES[name]
    assert wanted in answer(asked, *objects)
