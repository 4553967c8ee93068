"""What the agent's own token may do, by k8s/rbac.yaml and the policies, with the component dra."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.api import (
    ACCOUNT,
    ADMIN,
    APPLY,
    MERGE,
    Asked,
    ask,
    delete_dra,
    refusal,
    rights,
)
from tests.e2e.manifests import (
    DRA_API,
    DRIVER,
    Thing,
    claim,
    container,
    pod,
    resource_slice,
    template,
    thing,
)
from tests.e2e.node import NAMESPACE, Node
from tests.k8s.tools import overlay

pytestmark = pytest.mark.one_kubelet
COMPONENT = "dra"
CORDONED = "npu-agent/cordoned"
OTHER = "other-node"
ELSEWHERE = "npu-elsewhere"
EVENTS = "/api/v1/namespaces/default/events"
API = "/apis/resource.k8s.io/v1"
SLICES = f"{API}/resourceslices"
CLAIMS = f"{API}/namespaces/default/resourceclaims"
NEW = thing("Node", "new", namespace="")
EVERYTHING: Asked = ("GET", "/api/v1/secrets", None, MERGE)


@pytest.fixture(scope="module", autouse=True)
def component(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The agent is deployed with the component; a device plugin still, as its config says here."""
    directory = tmp_path_factory.mktemp("overlay")
    rendered = overlay(directory, [COMPONENT])
    node.deploy({}, str(directory))
    unbound = node.cluster.token_for(ACCOUNT, NAMESPACE)

    def in_force() -> bool:
        for asked in WRITES.values():
            assert "ValidatingAdmissionPolicy" in refusal(ask(node, unbound, *asked(node.name)))
        return True

    node.wait_for("the policies to be in force", in_force)
    yield
    delete_dra(node, rendered)
    node.deploy()


@pytest.fixture(scope="module")
def other(node: Node) -> Iterator[str]:
    """The name of a second Node, which no kubelet serves."""
    node.apply(thing("Node", OTHER, namespace=""))
    yield OTHER
    node.kubectl("delete", "node", OTHER)


@pytest.fixture(autouse=True)
def no_slices(node: Node) -> Iterator[None]:
    """Each test leaves no slices behind."""
    yield
    node.kubectl("delete", "resourceslices", "--all")


# --- requests -----------------------------------------------------------------------------------


def patch(name: str, body: Any, kind: str = MERGE, path: str = "") -> Asked:
    return "PATCH", f"/api/v1/nodes/{name}{path}?fieldManager={ACCOUNT}", body, kind


def label(name: str, labels: dict[str, str | None] | None = None) -> Asked:
    """Sets labels of a Node, by default one of ours."""
    return patch(name, {"metadata": {"labels": labels or {"furiosa.ai/x": "x"}}})


def event(about: str, kind: str = "Node", name: str = "some") -> Asked:
    """An Event about a Node."""
    body = thing(
        "Event",
        name,
        involvedObject={"apiVersion": "v1", "kind": kind, "name": about},
        reason="NPUUnhealthy",
        message="a test",
        type="Warning",
        count=1,
    )
    return "POST", EVENTS, body, "application/json"


def slice_(name: str, node: str | None, **fields: Any) -> Thing:
    """A ResourceSlice with one device."""
    device = {"name": "npu0", "attributes": {"index": {"int": 0}}}
    return resource_slice(name, node, [device], **fields)


def applied(made: Thing) -> Asked:
    """A server-side apply, as the agent writes its slices."""
    path = f"{SLICES}/{made['metadata']['name']}?fieldManager={ACCOUNT}&force=true"
    return "PATCH", path, made, APPLY


WRITES: dict[str, Callable[[str], Asked]] = {
    "node": label,
    "events": event,
    "slices": lambda node: applied(slice_("new", node)),
}
"""By policy a write that the agent of this Node may do."""


def every_write(made: Thing) -> list[Asked]:
    """All ways to make a slice, and to change or delete the one that is there."""
    name = made["metadata"]["name"]
    there, new = f"{SLICES}/{name}", {**made, "metadata": {"name": f"{name}-new"}}
    generation = {"spec": {"pool": {"generation": 2}}}
    return [
        ("POST", SLICES, new, "application/json"),
        applied(new),
        applied(made),
        ("PATCH", there, generation, MERGE),
        ("DELETE", there, None, "application/json"),
    ]


def make(node: Node, made: Thing) -> Thing:
    """An administrator makes this slice."""
    answer = ask(node, ADMIN, "POST", SLICES, made, real=True)
    assert answer.status == 201, answer
    return made


def accepted(node: Node, whose: str, *requests: Asked) -> bool:
    """Whether all are; new rights take a moment."""
    for asked in requests:
        answer = ask(node, whose, *asked)
        assert answer.status in (200, 201), answer
    return True


@contextlib.contextmanager
def bound(
    node: Node,
    account: str,
    namespace: str = NAMESPACE,
    roles: tuple[str, ...] = ("npu-agent", "npu-agent-dra"),
) -> Iterator[None]:
    """An account has these roles, by default the agent's."""
    subject = f"--serviceaccount={namespace}:{account}"
    names = {role: f"policy-test-{role}" for role in roles}
    for role, name in names.items():
        node.kubectl("create", "clusterrolebinding", name, f"--clusterrole={role}", subject)
    try:
        yield
    finally:
        node.kubectl("delete", "clusterrolebinding", *names.values())


# --- RBAC ---------------------------------------------------------------------------------------


def test_rbac_gives_these_rights_and_no_other(node: Node, token: str) -> None:
    everyone = rights(node, node.cluster.token_for("default", NAMESPACE))
    verbs = ("list", "watch", "create", "patch", "delete")
    assert rights(node, token) - everyone == {
        ("", "|", "nodes", "|", "get", "watch", "patch"),
        ("", "|", "events", "|", "create", "patch"),
        ("resource.k8s.io", "|", "resourceclaims", "|", "get"),
        ("resource.k8s.io", "|", "resourceslices", "|", *verbs),
    }


# --- all policies -------------------------------------------------------------------------------


def test_no_policy_has_a_doubtful_expression(node: Node) -> None:
    for name in ("own-node", "own-events", "own-slices", "no-parameters"):

        def checking(name: str = name) -> object:
            policy = node.get("validatingadmissionpolicy", f"npu-agent-{name}")
            return policy["status"]["typeChecking"]

        node.wait_equal(f"the policy {name} to be type-checked", checking, {})


REFUSED = {
    "node": "npu-agent on node {} may change that Node only, not other-node",
    "events": "npu-agent on node {} may write Events about that Node only",
    "slices": "npu-agent on node {} may write ResourceSlices of that node only",
}
"""What each policy says of another Node."""


def test_an_agent_changes_its_own_node_alone(node: Node, token: str, other: str) -> None:
    unbound = node.cluster.token_for(ACCOUNT, NAMESPACE)
    for policy, write in WRITES.items():
        assert accepted(node, token, write(node.name))
        message = refusal(ask(node, token, *write(other)))
        assert f"'npu-agent-own-{policy}'" in message
        assert REFUSED[policy].format(node.name) in message
        message = refusal(ask(node, unbound, *write(node.name)))
        assert "does not say on which node its Pod runs" in message


def test_even_an_administrators_rights_do_not_help(node: Node, token: str, other: str) -> None:
    theirs = make(node, slice_("theirs", other))
    with bound(node, ACCOUNT, roles=("cluster-admin",)):
        node.wait_for("the rights", lambda: accepted(node, token, EVERYTHING))
        capacity = {"status": {"capacity": {"furiosa.ai/x": "1"}}}
        for asked, words in (
            (patch(node.name, capacity, path="/status"), "nothing else of its status"),
            (("POST", "/api/v1/nodes", NEW), "not create nodes"),
            (patch("new", NEW, APPLY), "not create nodes"),
            (("DELETE", f"/api/v1/nodes/{node.name}"), "not delete nodes"),
        ):
            assert words in refusal(ask(node, token, *asked))
        there = node.get("resourceslice", "theirs")
        update = ("PUT", f"{SLICES}/theirs", there, "application/json")
        for asked in (*every_write(theirs), update):
            assert "of that node only" in refusal(ask(node, token, *asked))
        # Deleting all of them stops at the first that is not its own.
        ask(node, token, "DELETE", SLICES, real=True)
        assert node.get("resourceslice", "theirs")


def test_others_are_not_affected(node: Node, other: str) -> None:
    node.kubectl("create", "serviceaccount", "not-npu-agent", "-n", NAMESPACE)
    try:
        with bound(node, "not-npu-agent"):
            body = {"metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}}}
            writes = [patch(node.name, body), patch(other, body), event(other)]
            for driver in (DRIVER, "gpu.example.com"):
                writes += every_write(make(node, slice_(f"slice-{driver}", other, driver=driver)))
            for whose in (ADMIN, node.cluster.token_for("not-npu-agent", NAMESPACE)):

                def free(whose: str = whose) -> bool:
                    return accepted(node, whose, *writes)

                node.wait_for("all to be allowed", free)
    finally:
        node.kubectl("delete", "serviceaccount", "not-npu-agent", "-n", NAMESPACE)


def test_each_agent_has_its_own_node_whatever_the_namespace(node: Node, other: str) -> None:
    """The account is of another namespace, and its Pod on the other node."""
    account = thing("ServiceAccount", ACCOUNT, namespace=ELSEWHERE)
    where = {"nodeName": other, "serviceAccountName": ACCOUNT}
    node.apply(thing("Namespace", ELSEWHERE, namespace=""))
    try:
        node.apply([account, pod("agent", container(), namespace=ELSEWHERE, **where)])
        token = node.cluster.token_for(ACCOUNT, ELSEWHERE, pod="agent")
        writes = WRITES.values()
        with bound(node, ACCOUNT, ELSEWHERE):
            node.wait_for(
                "its rights", lambda: accepted(node, token, *(write(other) for write in writes))
            )
            for write in writes:
                message = refusal(ask(node, token, *write(node.name)))
                assert f"npu-agent on node {other} may" in message
    finally:
        gone = ("--namespace", ELSEWHERE, "--force", "--grace-period=0")
        node.kubectl("delete", "pod", "agent", *gone, check=False)
        node.kubectl("delete", "namespace", ELSEWHERE)


# --- its Node and Events ------------------------------------------------------------------------


OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"}


def test_an_agent_may_cordon_its_own_cards_and_no_others(
    node: Node, token: str, other: str
) -> None:
    for value in ('{"npu0": "x"}', None):
        cordon = {"metadata": {"annotations": {CORDONED: value}}}
        assert ask(node, token, *patch(node.name, cordon), real=True).status == 200
        assert "may change that Node only" in refusal(ask(node, token, *patch(other, cordon)))


FOREIGN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"metadata": {"labels": {"kubernetes.io/hostname": "x"}}}, "not kubernetes.io/hostname"),
    ({"metadata": {"labels": {"kubernetes.io/os": None}}}, "not kubernetes.io/os"),
    ({"metadata": {"labels": {"alpha.furiosa.ai/x": "x"}}}, "not alpha.furiosa.ai/x"),
    ({"metadata": {"labels": {"x.furiosa.ai/x": "x"}}}, "not x.furiosa.ai/x"),
    ({"metadata": {"labels": {"furiosa.ai.example.com/x": "x"}}}, "not furiosa.ai.example"),
    # One of ours with it does not help.
    ({"metadata": {"labels": {"furiosa.ai/x": "x", "a": "b"}}}, "npu-agent/simulated, not a"),
    ({"metadata": {"annotations": {"furiosa.ai/x": "x"}}}, "of its Node, not furiosa.ai/x"),
    ({"metadata": {"annotations": {CORDONED: "{}", "a": "b"}}}, "of its Node, not a"),
    ({"metadata": {"finalizers": ["furiosa.ai/x"]}}, "not finalizers"),
    ({"metadata": {"ownerReferences": [OWNER]}}, "not finalizers or ownerReferences"),
    ({"spec": {"unschedulable": True}}, "not spec"),
)
"""Changes of its Node that are not the agent's, and words of the refusal."""


def test_anything_else_of_its_node_is_refused(node: Node, token: str) -> None:
    for body, words in FOREIGN:
        message = refusal(ask(node, token, *patch(node.name, body)))
        assert "'npu-agent-own-node'" in message
        assert words in message
        assert "may change" in message


def test_events_about_its_own_node_only(node: Node, token: str, other: str) -> None:
    node.kubectl("delete", "events", "mine", "theirs", "-n", "default", check=False)
    assert ask(node, token, *event(node.name, name="mine"), real=True).status == 201
    counted = ask(node, token, "PATCH", f"{EVENTS}/mine", {"count": 2}, MERGE, real=True)
    assert counted.body["count"] == 2

    assert ask(node, ADMIN, *event(other, name="theirs"), real=True).status == 201
    about = {"involvedObject": {"name": node.name}}
    for asked in (
        event(node.name, kind="Pod"),
        ("PATCH", f"{EVENTS}/theirs", {"count": 2}, MERGE),
        ("PATCH", f"{EVENTS}/theirs", about, MERGE),
        ("PATCH", f"{EVENTS}/mine", {"involvedObject": {"name": other}}, MERGE),
    ):
        assert REFUSED["events"].format(node.name) in refusal(ask(node, token, *asked))
    node.kubectl("delete", "events", "mine", "theirs", "-n", "default")


# --- its slices and claims ----------------------------------------------------------------------


@pytest.mark.usefixtures("other")
def test_other_slices_are_refused(node: Node, token: str) -> None:
    pool = f"may write to the pool of that name only, not to {OTHER}"
    for made, words in (
        (slice_("of-another-node", OTHER), "of that node only"),
        (slice_("of-all-nodes", None, pool=node.name), "of that node only"),
        (
            slice_("of-another-driver", node.name, driver="gpu.example.com"),
            "of the driver npu.furiosa.ai only, not of gpu.",
        ),
        # With a newer generation it would make all slices of that node obsolete.
        (slice_("of-another-pool", node.name, pool=OTHER), pool),
    ):
        for asked in every_write(make(node, made)):
            assert words in refusal(ask(node, token, *asked)), asked


def test_fields_of_a_slice_that_the_policy_reads_never_change(node: Node) -> None:
    """So of an update it need not read the old one."""
    make(node, slice_("mine", node.name))
    for changed in ({"nodeName": OTHER}, {"driver": "gpu.example.com"}, {"pool": {"name": OTHER}}):
        answer = ask(node, ADMIN, "PATCH", f"{SLICES}/mine", {"spec": changed}, MERGE)
        assert answer.status == 422, answer
        assert "field is immutable" in answer.body["message"]


# --- parameters ---------------------------------------------------------------------------------


def with_parameters(kind: str, driver: str) -> tuple[str, Thing]:
    """Where to create a claim, a template or a class with parameters for a driver, and the object.

    As basic-resourceclaim-opaque-config of dra-example-driver has them.
    """
    parameters = {"apiVersion": "gpu.resource.example.com/v1alpha1", "kind": "GpuConfig"}
    config = [{"opaque": {"driver": driver, "parameters": parameters}}]
    if kind == "ResourceClaim":
        return CLAIMS, claim("policy-test", config=config)
    if kind == "ResourceClaimTemplate":
        path = CLAIMS.replace("claims", "claimtemplates")
        return path, template("policy-test", config=config)
    spec = {"config": config}
    return f"{API}/deviceclasses", thing(kind, "policy-test", DRA_API, namespace="", spec=spec)


def test_parameters_for_our_driver_are_refused(node: Node) -> None:
    for kind, where in (
        ("ResourceClaim", "spec.devices.config"),
        ("ResourceClaimTemplate", "spec.spec.devices.config"),
        ("DeviceClass", "spec.config"),
    ):
        path, made = with_parameters(kind, DRIVER)
        for version in ("v1", "v1beta2"):
            versioned = {**made, "apiVersion": f"resource.k8s.io/{version}"}
            asked = ask(node, ADMIN, "POST", path.replace("/v1/", f"/{version}/"), versioned)
            if version != "v1" and asked.status == 404:
                continue  # this API server does not serve it
            assert (
                "the driver npu.furiosa.ai takes no opaque parameters: remove those for it from "
                f"{where} of this {kind}"
            ) in refusal(asked)
        path, others = with_parameters(kind, "gpu.example.com")
        assert accepted(node, ADMIN, ("POST", path, others, "application/json"))


def test_a_claim_that_has_parameters_already_can_end(node: Node) -> None:
    """It was created before the policy."""
    binding = ("validatingadmissionpolicybinding", "npu-agent-no-parameters")
    policy = json.loads(node.kubectl("get", *binding, "-o", "json"))
    path, made = with_parameters("ResourceClaim", DRIVER)
    made["metadata"] |= {"finalizers": ["example.com/test"]}

    def created() -> bool:
        # By kubectl: parameters are compared as bytes, and a patch leaves no spaces in them.
        node.apply(made)
        return True

    node.kubectl("delete", *binding)
    try:
        node.wait_for("a claim to be created", created)
    finally:
        kept = {key: policy["metadata"][key] for key in ("name", "labels")}
        node.apply({**policy, "metadata": kept})
    another = {**made, "metadata": {"name": "another"}}
    node.wait_equal(
        "the policy to be in force", lambda: ask(node, ADMIN, "POST", path, another).status, 403
    )
    mine = f"{path}/{made['metadata']['name']}"
    changed = ask(node, ADMIN, "PATCH", mine, {"metadata": {"finalizers": None}}, MERGE, real=True)
    assert changed.status == 200, changed
    assert ask(node, ADMIN, "DELETE", mine, real=True).status == 200
