"""k8s/ as files: what can be said of them without a cluster; tests/e2e has a real one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_agent.labels.compute import KEYS

K8S = Path(__file__).parents[1] / "k8s"
POLICY = K8S / "components" / "own-node-policy"
ACCOUNT = "npu-agent"


def load(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def one(kind: str) -> dict[str, Any]:
    """The object of this kind in k8s/ itself."""
    (found,) = (
        thing
        for path in sorted(K8S.glob("*.yaml"))
        for thing in load(path)
        if thing["kind"] == kind
    )
    return found


@pytest.mark.parametrize("path", sorted(K8S.glob("*.yaml")), ids=lambda path: path.name)
def test_the_namespace_is_an_overlays_to_choose(path: Path) -> None:
    for thing in load(path):
        if thing["kind"] == "Kustomization":
            continue
        # kustomize lets a binding's subject follow its account only if neither names one.
        assert "namespace" not in thing.get("metadata", {})
        assert all("namespace" not in subject for subject in thing.get("subjects", ()))


def test_rbac_is_least() -> None:
    assert one("ClusterRole")["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
    ]
    binding = one("ClusterRoleBinding")
    assert binding["roleRef"]["name"] == one("ClusterRole")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": ACCOUNT}]


def test_only_the_daemonset_gets_a_token_and_that_one_ends() -> None:
    account = one("ServiceAccount")
    assert account["metadata"]["name"] == ACCOUNT
    assert account["automountServiceAccountToken"] is False
    pod = one("DaemonSet")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == ACCOUNT
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    mount = mounts["/var/run/secrets/kubernetes.io/serviceaccount"]  # where clients look
    assert mount["readOnly"] is True
    (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
    token, ca, namespace = volume["projected"]["sources"]
    # 3607 s is what automounting asks for, and what the API server turns into a year.
    assert token == {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
    assert ca["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert namespace["downwardAPI"]["items"][0]["path"] == "namespace"


@pytest.mark.parametrize("name", ["nodes", "events"])
def test_a_policy_fails_closed_and_is_in_force(name: str) -> None:
    policy, binding = load(POLICY / f"{name}.yaml")
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert binding["spec"] == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
    }
    for rule in policy["spec"]["validations"]:
        assert rule["reason"] == "Forbidden"
        assert rule.keys() & {"message", "messageExpression"}


@pytest.mark.parametrize("name", ["nodes", "events"])
def test_a_policy_is_about_the_agents_account_in_any_namespace(name: str) -> None:
    policy, _ = load(POLICY / f"{name}.yaml")
    (condition,) = policy["spec"]["matchConditions"]
    found = re.fullmatch(r"request\.userInfo\.username\.matches\('(.*)'\)", condition["expression"])
    assert found
    account = one("DaemonSet")["spec"]["template"]["spec"]["serviceAccountName"]
    for user, meant in (
        (f"system:serviceaccount:kube-system:{account}", True),
        (f"system:serviceaccount:npu-system:{account}", True),
        (f"system:serviceaccount:kube-system:not-{account}", False),
        (f"system:serviceaccount:kube-system:{account}-2", False),
        (f"someone:system:serviceaccount:kube-system:{account}", False),
        ("system:node:npu-agent", False),
        ("admin", False),
    ):
        assert bool(re.search(found[1], user)) is meant, user


def test_the_policy_knows_the_labels_that_the_agent_writes() -> None:
    policy, _ = load(POLICY / "nodes.yaml")
    (foreign,) = (v for v in policy["spec"]["variables"] if v["name"] == "foreign")
    prefixes = re.findall(r"key\.startsWith\('(.*?)'\)", foreign["expression"])
    assert prefixes == ["alpha.furiosa.ai/npu.", "beta.furiosa.ai/", "furiosa.ai/"]
    for keys in KEYS.values():
        assert all(key.startswith(tuple(prefixes)) for key in keys), keys
    (rule,) = (r for r in policy["spec"]["validations"] if "foreign" in r["expression"])
    assert all(prefix in rule["messageExpression"] for prefix in prefixes)
