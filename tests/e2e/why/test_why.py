"""`kubectl npu why` with a real API server and scheduler: its words, and facts beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.e2e.api import ADMIN, MERGE
from tests.people.cluster.build import (
    NPU,
    SPACE,
    Json,
    claim,
    claims,
    class_,
    cut,
    node,
    pod,
    request,
    thing,
)

PLUGIN = Path(sys.executable).with_name("kubectl-npu")
PATHS = {
    "Node": "/api/v1/nodes",
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": f"/api/v1/namespaces/{SPACE}/serviceaccounts",
    "Pod": f"/api/v1/namespaces/{SPACE}/pods",
    "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SPACE}/roles",
    "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SPACE}/rolebindings",
    "ResourceClaim": f"/apis/resource.k8s.io/v1/namespaces/{SPACE}/resourceclaims",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
}
TEAM = {"key": "team", "value": "ml", "effect": "NoSchedule"}
RBAC = "rbac.authorization.k8s.io"


def create(cluster: Cluster, *things: Json) -> None:
    for one in things:
        path = PATHS[one["kind"]]
        meta = {key: value for key, value in one["metadata"].items() if key != "uid"}
        answer = cluster.request("POST", path, {**one, "metadata": meta}, token=ADMIN)
        assert answer.status in (201, 409), answer
        if one["kind"] == "Node":
            # The API server has put a taint on it until its kubelet is ready.
            spec = {"spec": {"taints": one.get("spec", {}).get("taints")}}
            headers = {"Content-Type": MERGE}
            name = f"{path}/{meta['name']}"
            assert cluster.request("PATCH", name, spec, token=ADMIN, headers=headers).status == 200


@pytest.fixture(scope="package")
def scene(cluster: Cluster) -> Cluster:
    """n1 has little free, n2 much behind a taint, and n3 cards by DRA."""
    (slice_,) = cut("n3", "npu-0")
    slice_["spec"]["devices"] = slice_["spec"]["devices"][1:]  # no whole card
    for device in slice_["spec"]["devices"]:
        del device["consumesCounters"]
    space = thing("Namespace", SPACE)
    nodes = [node("n1", {NPU: "2"}), node("n2", {NPU: "8"}, spec={"taints": [TEAM]}), node("n3")]
    account = thing("ServiceAccount", "default", SPACE)
    create(cluster, space, account, *nodes, class_(), slice_)
    return cluster


def npu(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    done = cluster.enter(str(PLUGIN), *words, "-n", SPACE, check=False)
    print(f"$ kubectl npu {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done


def why(cluster: Cluster, name: str, *things: Json, **spec: Any) -> str:
    """What it says once the scheduler has reported on the Pod."""
    requests = {NPU: spec.pop(NPU)} if NPU in spec else spec.pop("requests", {})
    create(cluster, *things, pod(name, requests, **spec))

    def reported() -> bool:
        found = cluster.get("pod", name, SPACE)
        return any(one["type"] == "PodScheduled" for one in found["status"].get("conditions", ()))

    cluster.wait_for(f"the scheduler's word on {name}", reported, 60)
    done = npu(cluster, "why", name)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_taint_in_the_way_of_what_is_free(scene: Cluster) -> None:
    said = why(scene, "big", **{NPU: "4"})
    assert "Insufficient beta.furiosa.ai/npu" in said.splitlines()[1]
    assert "untolerated taint" in said.splitlines()[1]
    assert f"{NPU}: Nodes offer it: n2 (8 of 8 allocatable, Pods have 0), n1 (2 of" in said


def test_a_name_that_no_node_offers(scene: Cluster) -> None:
    name = "beta.furiosa.ai/npo"
    said = why(scene, "typo", requests={name: "1"})
    assert f"  {name}: no Node offers it; did you mean {NPU}?" in said


def test_the_devices_that_meet_the_selectors_of_a_claim(scene: Cluster) -> None:
    whole = 'device.attributes["npu.furiosa.ai"].cores == 8'
    asked = claim("whole", request("npu", whole))
    said = why(scene, "dra", asked, resourceClaims=claims(npu="whole"))
    assert "cannot allocate all claims" in said.splitlines()[1]
    assert f"of which 0 meet {whole} (request npu)" in said


def test_a_class_that_does_not_exist(scene: Cluster) -> None:
    asked = claim("classy", request("npu", deviceClassName="npu.furiosa.ia"))
    said = why(scene, "classy", asked, resourceClaims=claims(npu="classy"))
    assert "DeviceClass npu.furiosa.ia does not exist; did you mean npu.furiosa.ai?" in said


def test_a_user_with_rights_in_one_namespace_reads_the_schedulers_words(scene: Cluster) -> None:
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}
    role = {"apiGroup": RBAC, "kind": "Role", "name": "reader"}
    user = {"apiGroup": RBAC, "kind": "User", "name": "mia"}
    made = [
        thing("Role", "reader", SPACE, rules=[rule]),
        thing("RoleBinding", "reader", SPACE, roleRef=role, subjects=[user]),
    ]
    create(scene, *({**one, "apiVersion": f"{RBAC}/v1"} for one in made))
    words = why(scene, "seen", **{NPU: "4"}).splitlines()[1]
    done = npu(scene, "why", "seen", "--as", "mia")
    assert done.returncode == 0
    assert done.stdout.splitlines()[1] == words
    assert len(done.stderr.splitlines()) == 1
    assert "npu-viewer" in done.stderr
    done = npu(scene, "why", "seen", "--as", "nobody")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
