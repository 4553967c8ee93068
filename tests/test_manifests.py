"""k8s/ as files: what can be said of them without any program; tests/k8s has kustomize and Helm.

tests/e2e has a real cluster.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_agent.config import default_config
from npu_agent.vendors import SPEC
from npu_agent.vendors.furiosa.labels import SETS

from .k8s.schemas import VERSIONS, check

K8S = Path(__file__).parents[1] / "k8s"
BASE = sorted(set(K8S.glob("*.yaml")) - {K8S / "npu-agent.yaml"})
"""The files of the kustomize base; npu-agent.yaml is made of them."""
COMPONENTS = sorted(K8S.glob("components/*/"))
MANIFESTS = [K8S / "npu-agent.yaml", *BASE, *sorted(K8S.glob("components/**/*.yaml"))]
DOCS = K8S.parent / "docs"
EXAMPLES = [*DOCS.glob("examples/**/*.yaml"), *K8S.glob("examples/**/*.yaml")]
SCHEDULER = "npu-binpack-scheduler"
KUBELETS = {"/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources"}
POLICIES = {
    "own-node": K8S / "own-node-policy.yaml",
    "own-events": K8S / "own-events-policy.yaml",
}
ACCOUNT = "npu-agent"


def load(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def objects() -> list[tuple[Path, dict[str, Any]]]:
    """Every object for the API server, with its file."""
    return [
        (path, thing)
        for path in MANIFESTS
        for thing in load(path)
        if not thing["apiVersion"].startswith(("kustomize.config", "kubescheduler.config"))
    ]


def pods() -> list[tuple[str, dict[str, Any]]]:
    """Every Pod's spec, with the name of what makes it."""
    found = []
    for _, thing in objects():
        if "template" in thing.get("spec", {}):
            found.append((thing["metadata"]["name"], thing["spec"]["template"]["spec"]))
        elif thing["kind"] == "Pod":
            found.append((thing["metadata"]["name"], thing["spec"]))
    return found


def one(kind: str) -> dict[str, Any]:
    """The object of this kind in k8s/ itself."""
    (found,) = (thing for path in BASE for thing in load(path) if thing["kind"] == kind)
    return found


@pytest.mark.parametrize("path", BASE, ids=lambda path: path.name)
def test_the_namespace_is_an_overlays_to_choose(path: Path) -> None:
    for thing in load(path):
        if thing["kind"] == "Kustomization":
            continue
        # kustomize lets a binding's subject follow its account only if neither names one.
        assert "namespace" not in thing.get("metadata", {})
        assert all("namespace" not in subject for subject in thing.get("subjects", ()))


def test_rbac_is_least() -> None:
    assert one("ClusterRole")["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
    ]
    binding = one("ClusterRoleBinding")
    assert binding["roleRef"]["name"] == one("ClusterRole")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": ACCOUNT}]


def test_rbac_of_dra_is_least() -> None:
    role, _ = load(K8S / "components/dra/rbac.yaml")
    assert {rule["resources"][0]: rule["verbs"] for rule in role["rules"]} == {
        "resourceclaims": ["get"],
        "resourceslices": ["list", "watch", "create", "patch", "delete"],
    }


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


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_fails_closed_and_is_in_force(name: str) -> None:
    policy, binding = load(POLICIES[name])
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert binding["spec"] == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
    }
    for rule in policy["spec"]["validations"]:
        assert rule["reason"] == "Forbidden"
        assert rule.keys() & {"message", "messageExpression"}


@pytest.mark.parametrize("name", ["own-node", "own-events"])
def test_a_policy_is_about_the_agents_account_in_any_namespace(name: str) -> None:
    policy, _ = load(POLICIES[name])
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
    policy, _ = load(POLICIES["own-node"])
    (foreign,) = (v for v in policy["spec"]["variables"] if v["name"] == "foreign")
    prefixes = re.findall(r"key\.startsWith\('(.*?)'\)", foreign["expression"])
    assert prefixes == ["alpha.furiosa.ai/npu.", "beta.furiosa.ai/", "furiosa.ai/"]
    for keys in SETS.values():
        assert all(key.startswith(tuple(prefixes)) for key in keys.keys), keys.keys
    (rule,) = (r for r in policy["spec"]["validations"] if "variables.foreign." in r["expression"])
    assert all(prefix in rule["messageExpression"] for prefix in prefixes)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_file_fits_the_schemas(version: str) -> None:
    things = objects()
    assert len(things) > 30
    for _, thing in things:
        check(thing, version)


def test_every_example_fits_the_newest_schemas() -> None:
    examples = [thing for path in EXAMPLES for thing in load(path) if _is_kubernetes(thing)]
    kinds = {thing["kind"] for thing in examples}
    assert kinds >= {"ClusterRole", "Deployment", "Job", "Pod", "StatefulSet"}
    for thing in examples:
        check(thing, max(VERSIONS))


def _is_kubernetes(thing: dict[str, Any]) -> bool:
    """Whether this is an object that Kubernetes has a kind for, without a custom resource's."""
    group = thing.get("apiVersion", "none.example/v1").rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


def test_every_container_has_no_more_than_it_needs() -> None:
    seen = set()
    for name, pod in pods():
        # Jobs on RNGD need io_uring, which the default profile filters.
        profile = "Unconfined" if name.endswith("-example") else "RuntimeDefault"
        assert pod["securityContext"]["seccompProfile"] == {"type": profile}, name
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        for container in pod["containers"] + pod.get("initContainers", []):
            seen.add(name)
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context.get("privileged", False) is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            root = context.get("runAsUser", pod["securityContext"].get("runAsUser")) == 0
            may = name in ("npu-agent", "npu-example", "npu-tainted-example")
            assert root is may, name
            assert root or pod["securityContext"]["runAsNonRoot"] is True, name
    assert {"npu-agent", "npu-example", SCHEDULER} <= seen


def test_only_the_agent_sees_the_host() -> None:
    for name, pod in pods():
        paths = {v["hostPath"]["path"] for v in pod.get("volumes", ()) if "hostPath" in v}
        wanted = {"/dev", "/sys/bus", "/sys/class", "/sys/devices", "/sys/fs/cgroup", *KUBELETS}
        assert paths == (wanted if name == "npu-agent" else set()), name


def test_mounts_below_the_hosts_folders_are_not_writable_either() -> None:
    """`readOnly` is about the mount itself: cgroups and /dev/shm are mounts of their own."""
    pod = one("DaemonSet")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {
        mount["mountPath"]: mount
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["mountPath"].startswith("/host/")
    }
    assert all(mount["readOnly"] is True for mount in mounts.values())
    assert not any("recursiveReadOnly" in mount for mount in mounts.values())
    # Of /sys only what has no mounts below it (cgroups: on all that have version 2): not fs,
    # kernel or firmware.
    assert {path for path in mounts if path.startswith("/host/sys")} == {
        "/host/sys/bus",
        "/host/sys/class",
        "/host/sys/devices",
        "/host/sys/fs/cgroup",
    }
    for path in ("/host/dev/pts", "/host/dev/shm"):
        assert volumes[mounts[path]["name"]]["emptyDir"] == {}


def test_the_schedulers_policies_mean_the_same_pods_and_the_same_scheduler() -> None:
    refuse, _ = load(K8S / "components/scheduler-name-refuse/policy.yaml")
    fill, _ = load(K8S / "components/scheduler-name-fill/policy.yaml")
    rego = (K8S / "components/scheduler-name-opa/scheduler_name.rego").read_text(encoding="utf-8")
    config = yaml.safe_load(
        (K8S / "components/binpack-scheduler/config.yaml").read_text(encoding="utf-8")
    )
    assert fill["spec"]["matchConditions"][:2] == refuse["spec"]["matchConditions"]
    assert fill["spec"]["matchConstraints"] == refuse["spec"]["matchConstraints"]
    patterns = set(re.findall(r"[`'](\^.*furiosa.*?/)[`']", yaml.safe_dump(refuse, width=1000)))
    (pattern,) = {found.strip("'") for found in patterns}
    assert f"`{pattern}`" in rego
    (profile,) = config["profiles"]
    assert profile["schedulerName"] == SCHEDULER
    assert f"schedulerName: '{SCHEDULER}'" in str(
        fill["spec"]["mutations"][0]["applyConfiguration"]["expression"]
    )
    assert f"== '{SCHEDULER}'" in refuse["spec"]["validations"][0]["expression"]
    assert f'npu_scheduler := "{SCHEDULER}"' in rego

    (fit,) = (plugin["args"] for plugin in profile["pluginConfig"])
    packed = {resource["name"] for resource in fit["scoringStrategy"]["resources"]}
    packed -= {"cpu", "memory"}
    assert default_config(SPEC).resource_name in packed
    for name in packed:
        assert re.search(pattern, name), name
    # A cluster that moves to DRA packs as before.
    classes = load(K8S / "components/dra-classes/deviceclasses.yaml")
    assert {one["spec"]["extendedResourceName"] for one in classes} <= packed
    for name in ("cpu", "example.com/npu", "notfuriosa.ai/npu", "beta.furiosa.ai.example.com/npu"):
        assert not re.search(pattern, name), name


def test_every_component_says_what_it_is_and_how_it_is_added() -> None:
    readme = (K8S / "components" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (\w+) \|", readme, re.MULTILINE))
    assert rows.keys() == {path.name for path in COMPONENTS}
    for path in COMPONENTS:
        text = (path / "kustomization.yaml").read_text(encoding="utf-8")
        assert text.startswith("# "), path
        assert rows[path.name] == ("part" if "kind: Component" in text else "alone")
