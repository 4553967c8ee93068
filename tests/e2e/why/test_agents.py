"""A tenant's Pod with the agent's label, on a real API server: people's commands do not ask it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_agent.core.cordon import ANNOTATION
from tests.cluster import Cluster, settings
from tests.e2e.api import ADMIN, MERGE
from tests.e2e.why.test_why import PLUGIN
from tests.people.cluster.build import NPU, Json, node, pod, thing

LABELS = {"app.kubernetes.io/name": "npu-agent"}
NODE, TENANT = "drained", "a-tenant"


def ask(cluster: Cluster, method: str, path: str, body: Json) -> Json:
    kind = MERGE if method == "PATCH" else "application/json"
    headers = {"Content-Type": kind}
    answer = cluster.request(method, path, body, token=ADMIN, headers=headers)
    assert answer.status in (200, 201), answer
    return answer.body


def created(cluster: Cluster, path: str, one: Json) -> Json:
    return ask(cluster, "POST", path, {**one, "metadata": {**one["metadata"], "uid": None}})


def placed(
    cluster: Cluster, namespace: str, name: str, on: str, port: int = 0, **meta: object
) -> None:
    """A Pod of a Node without a kubelet; a program here answers for it at the port."""
    one = pod(name, {NPU: "1"} if not port and on == NODE else {}, on=on)
    one["metadata"] |= {"namespace": namespace, **meta}
    one["spec"] |= {"terminationGracePeriodSeconds": 0, "serviceAccountName": "default"}
    if port:
        one["spec"]["containers"][0]["ports"] = [{"containerPort": port}]
    path = f"/api/v1/namespaces/{namespace}/pods"
    created(cluster, path, one)
    address = settings.NODE_ADDRESS
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    ask(cluster, "PATCH", f"{path}/{name}/status", {"status": status})


def serve(cluster: Cluster, directory: Path, name: str, port: int, *cards: Json) -> None:
    (directory / name).mkdir()
    (directory / name / "status.json").write_text(json.dumps({"cards": cards}))
    server = [sys.executable, "-m", "http.server", str(port), f"--directory={directory / name}"]
    cluster.start_program(name, server, port)


def daemon_set(cluster: Cluster, namespace: str) -> Json:
    """The owner of a Pod of a DaemonSet, for which no controller runs here."""
    spec = pod("template")["spec"] | {"serviceAccountName": "default"}
    template = {"metadata": {"labels": LABELS}, "spec": spec}
    agents = {"selector": {"matchLabels": LABELS}, "template": template}
    one = thing("DaemonSet", "npu-agent", namespace, metadata={"labels": LABELS}, spec=agents)
    path = f"/apis/apps/v1/namespaces/{namespace}/daemonsets"
    made = created(cluster, path, {**one, "apiVersion": "apps/v1"})
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "name": "npu-agent",
        "uid": made["metadata"]["uid"],
        "controller": True,
    }


@pytest.fixture
def scene(cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """Pod `holds` has npu0; the tenant's page says that it has none, and `victim` elsewhere has."""
    for name in (TENANT, "agents"):
        created(cluster, "/api/v1/namespaces", thing("Namespace", name))
        path = f"/api/v1/namespaces/{name}/serviceaccounts"
        created(cluster, path, thing("ServiceAccount", "default", name))
    for name in (NODE, "other"):
        created(cluster, "/api/v1/nodes", node(name, {NPU: "2"}))
    card = {"id": "UUID-0", "uuid": "UUID-0", "name": "npu0", "core_count": 8}
    holder = {"namespace": TENANT, "pod": "holds", "resource": NPU}
    victim = {"namespace": TENANT, "pod": "victim", "resource": NPU}
    serve(cluster, tmp_path, "real", 9301, {**card, "cordoned": "fan", "holders": [holder]})
    serve(cluster, tmp_path, "fake", 9302, {**card, "id": "UUID-1", "holders": [victim]})
    owner = daemon_set(cluster, "agents")
    placed(cluster, "agents", "real", NODE, 9301, labels=LABELS, ownerReferences=[owner])
    placed(cluster, TENANT, "fake", NODE, 9302, labels=LABELS)
    placed(cluster, TENANT, "holds", NODE)
    placed(cluster, TENANT, "victim", "other")
    yield cluster
    cluster.kubectl("delete", "node", NODE, "other")  # other tests count what all Nodes have


def test_a_tenants_pod_is_no_agent_and_of_two_daemon_sets_both_are_named(scene: Cluster) -> None:
    done = scene.enter(
        *(str(PLUGIN), "drain", NODE, "npu0", "--reason", "fan", "--timeout", "1"), check=False
    )
    print(done.stdout, done.stderr)
    assert f"evicted {TENANT}/holds" in done.stdout
    assert "victim" not in done.stdout + done.stderr
    assert "is free" not in done.stdout  # as the agent's page still names the Pod
    assert scene.get("pod", "victim", TENANT)["status"]["phase"] == "Running"
    annotations = scene.get("node", NODE)["metadata"]["annotations"]
    assert json.loads(annotations[ANNOTATION]) == {"npu0": "fan"}  # no object knows the page's ID

    owner = daemon_set(scene, TENANT)
    placed(scene, TENANT, "owned", NODE, 9302, labels=LABELS, ownerReferences=[owner])
    done = scene.enter(str(PLUGIN), "drain", NODE, "npu0", check=False)
    assert done.returncode == 1
    assert f"agents of several DaemonSets, {TENANT}/owned and agents/real" in done.stderr
