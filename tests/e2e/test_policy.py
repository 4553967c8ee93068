"""What the agent's own token may do, by k8s/rbac.yaml and the policies installed with it."""

from __future__ import annotations

import base64
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
OTHER = "other-node"
ELSEWHERE = "npu-elsewhere"
EVENTS = "/api/v1/namespaces/default/events"
NEW = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "new"}}


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


@pytest.fixture(scope="module", autouse=True)
def policies(node: Node) -> None:
    """The policies, which are installed with the agent, are in force."""
    unbound = node.cluster.token_for(ACCOUNT, NAMESPACE)

    def in_force() -> bool:
        for what in (label(node.name, {"example.com/a": "b"}), event("trial", "Pod", "x")):
            answer = ask(node, unbound, *what)
            assert "ValidatingAdmissionPolicy" in answer.body.get("message", ""), answer
        return True

    node.cluster.wait_for("the policies to be in force", in_force, SOON)


def patch(name: str, body: Any, kind: str = MERGE, path: str = "") -> Asked:
    return "PATCH", f"/api/v1/nodes/{name}{path}?fieldManager={ACCOUNT}", body, kind


def label(name: str, labels: dict[str, str | None]) -> Asked:
    return patch(name, {"metadata": {"labels": labels}})


def event(name: str, kind: str, about: str) -> Asked:
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": kind, "name": about},
        "reason": "NPUUnhealthy",
        "message": "a test",
        "type": "Warning",
        "count": 1,
    }
    return "POST", EVENTS, body, "application/json"


def labels(node: Node) -> dict[str, str]:
    found: dict[str, str] = node.cluster.get("node", node.name)["metadata"]["labels"]
    return found


# --- the token, and RBAC ---------------------------------------------------------------------


def test_the_pods_token_names_pod_and_node_and_ends_in_an_hour(node: Node, token: str) -> None:
    part = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    assert claims["exp"] - claims["iat"] == 3600
    bound = claims["kubernetes.io"]
    assert bound["serviceaccount"]["name"] == ACCOUNT
    assert bound["pod"]["uid"] == node.agent_pods()[0]["metadata"]["uid"]
    assert bound["node"]["name"] == node.name
    # The other two files that clients look for.
    assert node.in_agent("cat", f"{SECRETS}/namespace") == NAMESPACE
    assert "BEGIN CERTIFICATE" in node.in_agent("cat", f"{SECRETS}/ca.crt")


def test_rbac_gives_these_rights_and_no_other(node: Node, token: str) -> None:
    everyone = rights(node, node.cluster.token_for("default", NAMESPACE))
    assert rights(node, token) - everyone == {
        ("", "|", "nodes", "|", "get", "patch"),
        ("", "|", "events", "|", "create", "patch"),
    }


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("GET", "/api/v1/nodes"), "cannot list resource"),
        (("GET", "/api/v1/pods"), "cannot list resource"),
        (("GET", "/api/v1/namespaces/kube-system/pods/x"), "cannot get resource"),
        (("GET", "/api/v1/namespaces/kube-system/secrets/x"), "cannot get resource"),
        (("DELETE", f"{EVENTS}/x"), "cannot delete resource"),
        (patch("self", {"status": {}}, path="/status"), "cannot patch resource"),
        # Server-side apply would create what is not there.
        (patch("new", NEW, APPLY), "cannot create resource"),
    ],
)
def test_rbac_refuses(node: Node, token: str, asked: Any, words: str) -> None:
    assert words in refusal(ask(node, token, *asked))


def test_what_rbac_cannot_say_is_left_to_the_policies(node: Node, token: str, other: str) -> None:
    for name in (node.name, other):
        assert ask(node, token, "GET", f"/api/v1/nodes/{name}").status == 200
    for asked in (label(other, {"furiosa.ai/a": "b"}), event("some", "Node", other)):
        assert "ValidatingAdmissionPolicy" in refusal(ask(node, token, *asked))


# --- the policies ---------------------------------------------------------------------------


def test_the_policies_have_no_doubtful_expression(node: Node) -> None:
    for name in ("npu-agent-own-node", "npu-agent-own-events"):

        def checked(name: str = name) -> bool:
            status = node.cluster.get("validatingadmissionpolicy", name)["status"]
            assert status["typeChecking"] == {}, status
            return True

        node.cluster.wait_for(f"{name} to be type-checked", checked, SOON)


def test_its_labels_on_its_node_are_accepted(node: Node, token: str) -> None:
    ours = {
        "alpha.furiosa.ai/npu.policy-test": "1",
        "beta.furiosa.ai/policy-test": "1",
        "furiosa.ai/policy-test": "1",
    }

    def applied(wanted: dict[str, str]) -> dict[str, str]:
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node.name, "labels": wanted},
        }
        # A field manager of its own: the agent's labels are not for this test to take away.
        path = f"/api/v1/nodes/{node.name}?fieldManager=policy-test&force=true"
        answer = ask(node, token, "PATCH", path, body, APPLY, real=True)
        assert answer.status == 200, answer
        return {key: value for key, value in labels(node).items() if "policy-test" in key}

    assert applied(ours) == ours
    assert applied(ours) == ours
    changed = {"furiosa.ai/policy-test": "2"}
    assert applied(changed) == changed
    assert applied({}) == {}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"metadata": {"labels": {"kubernetes.io/hostname": "x"}}}, "not kubernetes.io/hostname"),
        ({"metadata": {"labels": {"kubernetes.io/os": None}}}, "not kubernetes.io/os"),
        ({"metadata": {"labels": {"npu-agent/enabled": "false"}}}, "not npu-agent/enabled"),
        ({"metadata": {"labels": {"alpha.furiosa.ai/x": "x"}}}, "not alpha.furiosa.ai/x"),
        ({"metadata": {"labels": {"x.furiosa.ai/x": "x"}}}, "not x.furiosa.ai/x"),
        ({"metadata": {"labels": {"furiosa.ai.example.com/x": "x"}}}, "not furiosa.ai.example"),
        # One of ours beside it does not help.
        ({"metadata": {"labels": {"furiosa.ai/x": "x", "a": "b"}}}, "furiosa.ai/, not a"),
        ({"metadata": {"annotations": {"furiosa.ai/x": "x"}}}, "not annotations"),
        ({"metadata": {"finalizers": ["furiosa.ai/x"]}}, "not finalizers"),
        (
            {
                "metadata": {
                    "ownerReferences": [
                        {"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"},
                    ]
                }
            },
            "not finalizers or ownerReferences",
        ),
        ({"spec": {"unschedulable": True}}, "not spec"),
        ({"spec": {"taints": [{"key": "furiosa.ai/x", "effect": "NoSchedule"}]}}, "not spec"),
    ],
)
def test_anything_else_of_its_node_is_refused(
    node: Node, token: str, body: dict[str, Any], words: str
) -> None:
    message = refusal(ask(node, token, *patch(node.name, body)))
    assert "'npu-agent-own-node'" in message
    assert words in message
    assert "may change" in message


def test_another_node_is_refused(node: Node, token: str, other: str) -> None:
    message = refusal(ask(node, token, *label(other, {"furiosa.ai/x": "x"})))
    assert f"npu-agent on node {node.name} may change that Node only, not {other}" in message


def test_a_token_that_names_no_node_is_refused(node: Node) -> None:
    unbound = node.cluster.token_for(ACCOUNT, NAMESPACE)
    for asked in (label(node.name, {"furiosa.ai/x": "x"}), event("some", "Node", node.name)):
        message = refusal(ask(node, unbound, *asked))
        assert "does not say on which node its Pod runs" in message


def test_even_an_administrators_rights_do_not_help(node: Node, token: str) -> None:
    node.cluster.kubectl(
        *("create", "clusterrolebinding", "policy-test", "--clusterrole=cluster-admin"),
        f"--serviceaccount={NAMESPACE}:{ACCOUNT}",
    )
    try:
        node.cluster.wait_for(
            "the rights", lambda: ask(node, token, "GET", "/api/v1/nodes").status == 200, SOON
        )
        capacity = {"status": {"capacity": {"furiosa.ai/x": "1"}}}
        for asked, words in (
            (patch(node.name, capacity, path="/status"), "not update nodes/status"),
            (("POST", "/api/v1/nodes", NEW), "not create nodes"),
            (patch("new", NEW, APPLY), "not create nodes"),
            (("DELETE", f"/api/v1/nodes/{node.name}"), "not delete nodes"),
        ):
            assert words in refusal(ask(node, token, *asked))
    finally:
        node.cluster.kubectl("delete", "clusterrolebinding", "policy-test")


def test_others_are_not_affected(node: Node, other: str) -> None:
    node.cluster.kubectl("create", "serviceaccount", "not-npu-agent", "-n", NAMESPACE)
    node.cluster.kubectl(
        *("create", "clusterrolebinding", "policy-test", "--clusterrole=npu-agent"),
        f"--serviceaccount={NAMESPACE}:not-npu-agent",
    )
    try:
        for whose in (ADMIN, node.cluster.token_for("not-npu-agent", NAMESPACE)):

            def free(whose: str = whose) -> bool:
                for name in (node.name, other):
                    body = {"metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}}}
                    answer = ask(node, whose, *patch(name, body))
                    assert answer.status == 200, answer
                answer = ask(node, whose, *event("some", "Node", other))
                assert answer.status == 201, answer
                return True

            # New rights take a moment.
            node.cluster.wait_for("all to be allowed", free, SOON)
    finally:
        node.cluster.kubectl("delete", "clusterrolebinding", "policy-test")
        node.cluster.kubectl("delete", "serviceaccount", "not-npu-agent", "-n", NAMESPACE)


def test_events_about_its_own_node_only(node: Node, token: str, other: str) -> None:
    node.cluster.kubectl("delete", "events", "mine", "theirs", "-n", "default", check=False)
    created = ask(node, token, *event("mine", "Node", node.name), real=True)
    assert created.status == 201, created
    counted = ask(node, token, "PATCH", f"{EVENTS}/mine", {"count": 2}, MERGE, real=True)
    assert counted.body["count"] == 2

    assert ask(node, ADMIN, *event("theirs", "Node", other), real=True).status == 201
    about = {"involvedObject": {"name": node.name}}
    for asked in (
        event("some", "Node", other),
        event("some", "Pod", node.name),
        ("PATCH", f"{EVENTS}/theirs", {"count": 2}, MERGE),
        ("PATCH", f"{EVENTS}/theirs", about, MERGE),
        ("PATCH", f"{EVENTS}/mine", {"involvedObject": {"name": other}}, MERGE),
    ):
        message = refusal(ask(node, token, *asked))
        assert f"npu-agent on node {node.name} may write Events about that Node only" in message
    node.cluster.kubectl("delete", "events", "mine", "theirs", "-n", "default")


def test_the_policies_hold_in_another_namespace_too(node: Node, other: str, tmp_path: Path) -> None:
    rendered = overlay(node, tmp_path, namespace=ELSEWHERE)
    assert {t["metadata"]["name"]: t["spec"] for t in rendered if is_policy(t)} == {
        t["metadata"]["name"]: t["spec"] for t in overlay(node, tmp_path) if is_policy(t)
    }
    (account,) = (t for t in rendered if t["kind"] == "ServiceAccount")
    (binding,) = (t for t in rendered if t["kind"] == "ClusterRoleBinding")
    binding["metadata"]["name"] = "policy-test"  # beside the one in kube-system, which is in use
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "agent", "namespace": ELSEWHERE},
        "spec": {
            "serviceAccountName": account["metadata"]["name"],
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": WORKLOAD, "imagePullPolicy": "Never"}],
        },
    }
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ELSEWHERE}}
    node.cluster.apply(space)
    try:
        node.cluster.apply([account, binding, pod])
        node.cluster.wait_for(
            "the Pod to have its node",
            lambda: node.cluster.get("pod", "agent", ELSEWHERE)["spec"]["nodeName"] == node.name,
            SOON,
        )
        token = node.cluster.token_for(ACCOUNT, ELSEWHERE, pod="agent")

        def accepted() -> bool:
            answer = ask(node, token, *label(node.name, {"furiosa.ai/x": "x"}))
            assert answer.status == 200, answer
            return True

        node.cluster.wait_for("its rights", accepted, SOON)
        assert "may change that Node only" in refusal(
            ask(node, token, *label(other, {"furiosa.ai/x": "x"}))
        )
        assert "not npu-agent/enabled" in refusal(
            ask(node, token, *label(node.name, {"npu-agent/enabled": None}))
        )
    finally:
        node.cluster.kubectl("delete", "clusterrolebinding", "policy-test", "--ignore-not-found")
        node.cluster.kubectl("delete", "namespace", ELSEWHERE)


def test_the_agent_does_its_work_under_the_policy(node: Node) -> None:
    def seen() -> tuple[str | None, set[str]]:
        labels = node.cluster.get("node", node.name)["metadata"]["labels"]
        events = node.cluster.objects("event", "default")
        ours = [e for e in events if e["source"].get("component") == "npu-agent"]
        return labels.get("beta.furiosa.ai/npu.count"), {event["reason"] for event in ours}

    def so(count: str, reason: str) -> bool:
        found = seen()
        assert found[0] == count, found
        assert reason in found[1], found
        return True

    node.cluster.kubectl("delete", "events", "-n", "default", "--all")
    node.fault("npu1", "gone")
    node.cluster.wait_for("label and Event", lambda: so("1", "NPURemoved"), SOON)
    node.fault("npu1", "back")
    node.cluster.wait_for("label and Event", lambda: so("2", "NPUAdded"), SOON)
