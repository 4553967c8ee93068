"""What the agent's own token may do with claims and slices, by k8s/components/dra as rendered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.api import (
    ACCOUNT,
    ADMIN,
    APPLY,
    MERGE,
    SECRETS,
    Asked,
    ask,
    is_policy,
    overlay,
    refusal,
    rights,
)
from tests.e2e.node import NAMESPACE, SOON, WORKLOAD, Node

pytestmark = pytest.mark.one_kubelet
COMPONENT = "dra"
DRIVER = "npu.furiosa.ai"
OTHER = "other-node"
ELSEWHERE = "npu-elsewhere"
API = "/apis/resource.k8s.io/v1"
SLICES = f"{API}/resourceslices"
CLAIMS = f"{API}/namespaces/default/resourceclaims"


@pytest.fixture(scope="module", autouse=True)
def component(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The agent is deployed with the component; a device plugin still, as its config says here."""
    directory = tmp_path_factory.mktemp("overlay")
    rendered = overlay(node, directory, COMPONENT)
    node.deploy({"defaultPe": "Fusion"}, str(directory))
    unbound = node.cluster.token_for(ACCOUNT, NAMESPACE)

    def in_force() -> bool:
        answer = ask(node, unbound, "POST", SLICES, slice_("trial", node.name))
        assert "ValidatingAdmissionPolicy" in answer.body.get("message", ""), answer
        return True

    node.cluster.wait_for("the policy to be in force", in_force, SOON)
    yield
    for thing in rendered:
        if is_policy(thing) or thing["kind"] == "DeviceClass":
            node.cluster.kubectl("delete", thing["kind"], thing["metadata"]["name"])
    node.deploy({"defaultPe": "Fusion"})


@pytest.fixture
def token(node: Node) -> str:
    """The token that the kubelet has given the agent's Pod."""
    return node.in_agent("cat", f"{SECRETS}/token")


@pytest.fixture(scope="module")
def other(node: Node) -> Iterator[str]:
    """The name of a second Node, which no kubelet serves."""
    node.cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER}})
    yield OTHER
    node.cluster.kubectl("delete", "node", OTHER)


@pytest.fixture(autouse=True)
def no_slices(node: Node) -> Iterator[None]:
    """Each test leaves no slices behind."""
    yield
    node.cluster.kubectl("delete", "resourceslices", "--all")


def slice_(
    name: str, node: str | None, driver: str = DRIVER, pool: str | None = None
) -> dict[str, Any]:
    """A ResourceSlice with one device; without a `node` it is for all nodes."""
    where = {"nodeName": node} if node else {"allNodes": True}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            **where,
            "pool": {"name": pool or node or "all", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "npu0", "attributes": {"index": {"int": 0}}}],
        },
    }


def applied(thing: dict[str, Any]) -> Asked:
    """A server-side apply, as the agent writes its slices."""
    path = f"{SLICES}/{thing['metadata']['name']}?fieldManager={ACCOUNT}&force=true"
    return "PATCH", path, thing, APPLY


def every_write(thing: dict[str, Any]) -> list[Asked]:
    """All ways to make a slice, and to change or delete the one that is there."""
    name = thing["metadata"]["name"]
    there, new = f"{SLICES}/{name}", {**thing, "metadata": {"name": f"{name}-new"}}
    generation = {"spec": {"pool": {"generation": 2}}}
    return [
        ("POST", SLICES, new, "application/json"),
        applied(new),
        applied(thing),
        ("PATCH", there, generation, MERGE),
        ("DELETE", there, None, "application/json"),
    ]


def make(node: Node, thing: dict[str, Any]) -> dict[str, Any]:
    """An administrator makes this slice."""
    answer = ask(node, ADMIN, "POST", SLICES, thing, real=True)
    assert answer.status == 201, answer
    return thing


# --- the Pod -----------------------------------------------------------------------------------


def test_the_agent_shares_its_directories_with_the_host(node: Node) -> None:
    for inside, outside in (
        ("/var/lib/kubelet/plugins/npu.furiosa.ai", "/var/lib/kubelet/plugins/npu.furiosa.ai"),
        ("/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/plugins_registry"),
        ("/host/var/run/cdi", "/var/run/cdi"),
    ):
        node.in_agent("sh", "-c", f"echo from the agent > {inside}/.dra-policy-test")
        file = f"{outside}/.dra-policy-test"
        try:
            assert node.cluster.enter("cat", file).stdout == "from the agent\n"
        finally:
            node.cluster.enter("rm", file)


def test_the_agent_knows_the_uid_of_its_pod(node: Node) -> None:
    (pod,) = node.agent_pods()
    assert node.in_agent("printenv", "POD_UID").strip() == pod["metadata"]["uid"]


# --- RBAC --------------------------------------------------------------------------------------


def test_rbac_gives_these_rights_and_no_other(node: Node, token: str) -> None:
    everyone = rights(node, node.cluster.token_for("default", NAMESPACE))
    verbs = ("get", "list", "watch", "create", "patch", "delete")
    assert rights(node, token) - everyone == {
        ("", "|", "nodes", "|", "get", "patch"),
        ("", "|", "events", "|", "create", "patch"),
        ("resource.k8s.io", "|", "resourceclaims", "|", "get"),
        ("resource.k8s.io", "|", "resourceslices", "|", *verbs),
    }


def test_it_may_read_a_claim_and_nothing_else_of_claims(node: Node, token: str) -> None:
    claim: dict[str, Any] = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "dra-policy-test", "namespace": "default"},
        "spec": {
            "devices": {"requests": [{"name": "npu", "exactly": {"deviceClassName": DRIVER}}]}
        },
    }
    node.cluster.apply(claim)
    mine = f"{CLAIMS}/dra-policy-test"
    another = {**claim, "metadata": {"name": "another", "namespace": "default"}}
    try:
        read = ask(node, token, "GET", mine)
        assert (read.status, read.body["spec"]["devices"]["requests"][0]["name"]) == (200, "npu")
        refused: list[tuple[Any, str]] = [
            (("GET", CLAIMS), "list"),
            (("GET", f"{API}/resourceclaims?watch=1"), "watch"),
            (("POST", CLAIMS, another), "create"),
            (("PATCH", mine, {"metadata": {"labels": {"a": "b"}}}, MERGE), "patch"),
            (("PATCH", f"{mine}/status", {"status": {}}, MERGE), "patch"),
            (("DELETE", mine), "delete"),
        ]
        for asked, verb in refused:
            assert f"cannot {verb} resource" in refusal(ask(node, token, *asked))
    finally:
        node.cluster.kubectl("delete", "resourceclaim", "dra-policy-test")


def test_it_may_not_change_what_the_cluster_offers(node: Node, token: str) -> None:
    classes = f"{API}/deviceclasses"
    refused: list[Any] = [
        ("GET", classes),
        ("PATCH", f"{classes}/{DRIVER}", {"spec": {"selectors": []}}, MERGE),
        ("DELETE", f"{classes}/{DRIVER}"),
        # All slices in one request: the kubelet may, the agent may not.
        ("DELETE", SLICES),
    ]
    for asked in refused:
        assert "cannot" in refusal(ask(node, token, *asked))


# --- the policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["npu-agent-own-slices", "npu-agent-no-parameters"])
def test_the_policy_has_no_doubtful_expression(node: Node, name: str) -> None:
    def checked() -> bool:
        status = node.cluster.get("validatingadmissionpolicy", name)["status"]
        assert status["typeChecking"] == {}, status
        return True

    node.cluster.wait_for("the policy to be type-checked", checked, SOON)


def test_slices_of_its_own_node_and_driver_are_its_own(node: Node, token: str) -> None:
    first = slice_("mine", node.name)
    uid = node.cluster.get("node", node.name)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": uid, "controller": True}
    first["metadata"]["ownerReferences"] = [owner]

    created = ask(node, token, *applied(first), real=True)
    assert created.status == 201, created
    again = ask(node, token, *applied(first), real=True)
    assert again.status == 200
    version = again.body["metadata"]["resourceVersion"]
    assert version == created.body["metadata"]["resourceVersion"], "nothing to write"

    first["spec"]["devices"].append({"name": "npu1"})
    changed = ask(node, token, *applied(first), real=True)
    assert changed.status == 200, changed
    assert [device["name"] for device in changed.body["spec"]["devices"]] == ["npu0", "npu1"]

    assert ask(node, token, "POST", SLICES, slice_("more", node.name), real=True).status == 201
    assert ask(node, token, "GET", f"{SLICES}/mine").status == 200
    selector = f"fieldSelector=spec.nodeName={node.name},spec.driver={DRIVER}"
    seen = ask(node, token, "GET", f"{SLICES}?{selector}").body["items"]
    assert {one["metadata"]["name"] for one in seen} == {"mine", "more"}
    for name in ("mine", "more"):
        assert ask(node, token, "DELETE", f"{SLICES}/{name}", real=True).status == 200
    assert node.cluster.objects("resourceslice") == []


def test_slices_of_another_node_are_refused(node: Node, token: str, other: str) -> None:
    for asked in every_write(make(node, slice_("theirs", other))):
        message = refusal(ask(node, token, *asked))
        assert "'npu-agent-own-slices'" in message
        assert (
            f"npu-agent on node {node.name} may write ResourceSlices of that node only" in message
        )


def test_slices_of_no_node_are_refused(node: Node, token: str) -> None:
    for asked in every_write(make(node, slice_("everywhere", None, pool=node.name))):
        assert "of that node only" in refusal(ask(node, token, *asked))


def test_slices_of_another_driver_are_refused(node: Node, token: str) -> None:
    for asked in every_write(make(node, slice_("gpus", node.name, driver="gpu.example.com"))):
        message = refusal(ask(node, token, *asked))
        assert "of the driver npu.furiosa.ai only, not of gpu.example.com" in message


def test_slices_of_another_nodes_pool_are_refused(node: Node, token: str, other: str) -> None:
    """With a newer generation it would make all slices of that node obsolete."""
    for asked in every_write(make(node, slice_("mixed", node.name, pool=other))):
        message = refusal(ask(node, token, *asked))
        assert f"may write to the pool of that name only, not to {other}" in message


def test_what_the_policy_reads_of_a_slice_never_changes(node: Node, other: str) -> None:
    """So of an update it need not read the old one."""
    make(node, slice_("mine", node.name))
    for changed in (
        {"nodeName": other},
        {"driver": "gpu.example.com"},
        {"pool": {"name": other}},
    ):
        answer = ask(node, ADMIN, "PATCH", f"{SLICES}/mine", {"spec": changed}, MERGE)
        assert answer.status == 422, answer
        assert "field is immutable" in answer.body["message"]


def test_a_token_that_names_no_node_is_refused(node: Node) -> None:
    unbound = node.cluster.token_for(ACCOUNT, NAMESPACE)
    for asked in every_write(make(node, slice_("mine", node.name))):
        message = refusal(ask(node, unbound, *asked))
        assert "does not say on which node its Pod runs" in message


def test_even_an_administrators_rights_do_not_help(node: Node, token: str, other: str) -> None:
    theirs = make(node, slice_("theirs", other))
    node.cluster.kubectl(
        *("create", "clusterrolebinding", "policy-test", "--clusterrole=cluster-admin"),
        f"--serviceaccount={NAMESPACE}:{ACCOUNT}",
    )
    try:
        node.cluster.wait_for(
            "the rights", lambda: ask(node, token, "GET", "/api/v1/pods").status == 200, SOON
        )
        update = ("PUT", f"{SLICES}/theirs", node.cluster.get("resourceslice", "theirs"), MERGE)
        for asked in (*every_write(theirs), (*update[:3], "application/json")):
            assert "of that node only" in refusal(ask(node, token, *asked))
        # Deleting all of them stops at the first that is not its own.
        ask(node, token, "DELETE", SLICES, real=True)
        assert node.cluster.get("resourceslice", "theirs")
    finally:
        node.cluster.kubectl("delete", "clusterrolebinding", "policy-test")


def test_others_are_not_affected(node: Node, other: str) -> None:
    for driver in (DRIVER, "gpu.example.com"):
        for asked in every_write(make(node, slice_(f"slice-{driver}", other, driver=driver))):
            answer = ask(node, ADMIN, *asked)
            assert answer.status in (200, 201), answer


def test_each_agent_has_its_own_node_whatever_the_namespace(
    node: Node, other: str, tmp_path: Path
) -> None:
    """The account is that of the rendered DaemonSet; its Pod here is on the other node."""
    rendered = overlay(node, tmp_path, COMPONENT, namespace=ELSEWHERE)
    assert {t["metadata"]["name"]: t["spec"] for t in rendered if is_policy(t)} == {
        t["metadata"]["name"]: t["spec"] for t in overlay(node, tmp_path, COMPONENT) if is_policy(t)
    }
    (daemonset,) = (t for t in rendered if t["kind"] == "DaemonSet")
    name = daemonset["spec"]["template"]["spec"]["serviceAccountName"]
    (account,) = (t for t in rendered if t["kind"] == "ServiceAccount")
    assert (account["metadata"]["name"], account["metadata"]["namespace"]) == (name, ELSEWHERE)
    # kustomize writes the namespace into these, which have none; it does no harm.
    node.cluster.apply([t for t in rendered if is_policy(t) or t["kind"] == "DeviceClass"])
    (binding,) = (t for t in rendered if t["kind"] == "ClusterRoleBinding")
    binding["metadata"]["name"] = "policy-test"  # beside the one in kube-system, which is in use
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "agent", "namespace": ELSEWHERE},
        "spec": {
            "nodeName": other,
            "serviceAccountName": name,
            "containers": [{"name": "main", "image": WORKLOAD}],
        },
    }
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ELSEWHERE}}
    node.cluster.apply(space)
    try:
        node.cluster.apply([account, binding, pod])
        token = node.cluster.token_for(name, ELSEWHERE, pod="agent")

        def accepted() -> bool:
            answer = ask(node, token, *applied(slice_("theirs", other)), real=True)
            assert answer.status == 201, answer
            return True

        node.cluster.wait_for("its rights", accepted, SOON)
        for asked in every_write(make(node, slice_("mine", node.name))):
            message = refusal(ask(node, token, *asked))
            assert f"npu-agent on node {other} may write ResourceSlices of that node" in message
    finally:
        node.cluster.kubectl("delete", "clusterrolebinding", "policy-test", "--ignore-not-found")
        node.cluster.kubectl(
            *("delete", "pod", "agent", "-n", ELSEWHERE, "--force", "--grace-period=0"),
            check=False,
        )
        node.cluster.kubectl("delete", "namespace", ELSEWHERE)


# --- parameters --------------------------------------------------------------------------------


def with_parameters(kind: str, driver: str) -> tuple[str, dict[str, Any]]:
    """Where to create a claim, a template or a class with parameters for a driver, and the object.

    As basic-resourceclaim-opaque-config of dra-example-driver has them.
    """
    parameters = {"apiVersion": "gpu.resource.example.com/v1alpha1", "kind": "GpuConfig"}
    config = [{"opaque": {"driver": driver, "parameters": parameters}}]
    requests = [{"name": "npu", "exactly": {"deviceClassName": DRIVER}}]
    spec: dict[str, Any] = {"devices": {"requests": requests, "config": config}}
    path = CLAIMS
    if kind == "ResourceClaimTemplate":
        path, spec = CLAIMS.replace("claims", "claimtemplates"), {"spec": spec}
    if kind == "DeviceClass":
        path, spec = f"{API}/deviceclasses", {"config": config}
    meta = {"name": "dra-policy-test"}
    return path, {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": meta, "spec": spec}


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("ResourceClaim", "spec.devices.config"),
        ("ResourceClaimTemplate", "spec.spec.devices.config"),
        ("DeviceClass", "spec.config"),
    ],
)
def test_parameters_for_our_driver_are_refused(node: Node, kind: str, where: str) -> None:
    path, thing = with_parameters(kind, DRIVER)
    for version in ("v1", "v1beta2"):
        versioned = {**thing, "apiVersion": f"resource.k8s.io/{version}"}
        asked = ask(node, ADMIN, "POST", path.replace("/v1/", f"/{version}/"), versioned)
        if version != "v1" and asked.status == 404:
            continue  # this API server does not serve it
        assert (
            "the driver npu.furiosa.ai takes no opaque parameters: remove those for it from "
            f"{where} of this {kind}"
        ) in refusal(asked)
    path, others = with_parameters(kind, "gpu.example.com")
    answer = ask(node, ADMIN, "POST", path, others)
    assert answer.status == 201, answer


def test_a_claim_that_has_parameters_already_can_end(node: Node) -> None:
    """It was created before the policy."""
    binding = ("validatingadmissionpolicybinding", "npu-agent-no-parameters")
    policy = json.loads(node.cluster.kubectl("get", *binding, "-o", "json"))
    path, thing = with_parameters("ResourceClaim", DRIVER)
    thing["metadata"] |= {"namespace": "default", "finalizers": ["example.com/test"]}

    def created() -> bool:
        # By kubectl: parameters are compared as bytes, and a patch leaves no spaces in them.
        node.cluster.apply(thing)
        return True

    node.cluster.kubectl("delete", *binding)
    try:
        node.cluster.wait_for("a claim to be created", created, SOON)
    finally:
        kept = {key: policy["metadata"][key] for key in ("name", "labels")}
        node.cluster.apply({**policy, "metadata": kept})

    def in_force() -> bool:
        other = {**thing, "metadata": {"name": "another"}}
        assert ask(node, ADMIN, "POST", path, other).status == 403
        return True

    node.cluster.wait_for("the policy to be in force", in_force, SOON)
    claim = f"{path}/{thing['metadata']['name']}"
    changed = ask(node, ADMIN, "PATCH", claim, {"metadata": {"finalizers": None}}, MERGE, real=True)
    assert changed.status == 200, changed
    assert ask(node, ADMIN, "DELETE", claim, real=True).status == 200
