"""k8s/ as kustomize makes it: generated files, components, overlays, all against the schemas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from .conftest import Overlay
from .manifests import COPIES, generated
from .schemas import VERSIONS, check
from .tools import (
    K8S,
    PARTS,
    PARTS_BUT_NODES,
    STAND_ALONE,
    Object,
    by_kind,
    config_of,
    kustomize,
    objects,
    output,
    pod_of,
)

SCOPELESS = {
    "ClusterRole",
    "ClusterRoleBinding",
    "DeviceClass",
    "MutatingAdmissionPolicy",
    "MutatingAdmissionPolicyBinding",
    "Namespace",
    "SecurityContextConstraints",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
"""Kinds that live in no namespace."""


def terms(things: list[Object]) -> list[set[str]]:
    """The node affinity's terms, each as the expressions that have to hold."""
    affinity = pod_of(things)["affinity"]["nodeAffinity"]
    return [
        {f"{e['key']} {e['operator']} {','.join(e['values'])}" for e in term["matchExpressions"]}
        for term in affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    ]


def test_generated_files_are_current() -> None:
    assert {path.name for path in (K8S / "chart" / "files").iterdir()} == {*COPIES, "values.yaml"}
    stale = [
        str(path.relative_to(K8S))
        for path, text in generated().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run `make manifests`"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", PARTS)
def test_a_component_with_the_base_is_valid(name: str, version: str, overlay: Overlay) -> None:
    made = overlay([name])
    assert made != overlay()
    for thing in made:
        check(thing, version)


def test_an_own_namespace_is_made_by_the_overlays_name(overlay: Overlay) -> None:
    things = overlay(PARTS_BUT_NODES, namespace="npus")
    volumes = [volume["name"] for volume in pod_of(things)["volumes"]]
    assert len(volumes) == len(set(volumes))
    assert by_kind(things, "Namespace")["metadata"]["name"] == "npus"
    for thing in things:
        if thing["kind"] not in SCOPELESS:
            assert thing["metadata"]["namespace"] == "npus"
    bindings = [thing for thing in things if thing["kind"] == "ClusterRoleBinding"]
    assert bindings
    for binding in bindings:
        assert [subject["namespace"] for subject in binding["subjects"]] == ["npus"]


AWAY = "npu-agent/enabled NotIn false"
OURS = {"npu-agent/enabled In true"}
NFD = {"feature.node.kubernetes.io/pci-1ed2.present In true", AWAY}
NFD_CLASS = {"feature.node.kubernetes.io/pci-1200_1ed2.present In true", AWAY}


@pytest.mark.parametrize(
    ("components", "wanted"),
    [
        ([], [OURS, NFD, NFD_CLASS]),
        (["nodes-label"], [OURS]),
        (["nodes-nfd"], [NFD]),
        (["nodes-nfd-class"], [NFD_CLASS]),
    ],
    ids=["default", "label", "nfd", "nfd-class"],  # sets have no order for the workers to agree on
)
def test_where_it_runs(components: list[str], wanted: list[set[str]], overlay: Overlay) -> None:
    assert terms(overlay(components)) == wanted
    assert "affinity" not in pod_of(overlay(["nodes-every"]))


@pytest.mark.parametrize("name", STAND_ALONE)
def test_an_overlay_chooses_namespace_and_images(name: str, overlay: Overlay) -> None:
    made = overlay(
        resource=f"components/{name}",
        namespace="elsewhere",
        images=[
            {"name": "npu-agent", "newName": "registry.example.com/npu-agent"},
            {"name": "registry.k8s.io/kube-scheduler", "newTag": "v1.30.14"},
        ],
    )
    # The agent's DaemonSet would adopt such a Pod, its Service and PodMonitor send scrapes there.
    selector = by_kind(overlay(), "DaemonSet")["spec"]["selector"]["matchLabels"]
    for thing in made:
        if thing["kind"] not in SCOPELESS:
            assert thing["metadata"]["namespace"] == "elsewhere"
        for subject in thing.get("subjects", ()):
            assert subject["namespace"] == "elsewhere"
        whole = thing if thing["kind"] == "Pod" else thing.get("spec", {}).get("template", {})
        pod = whole.get("spec", {})
        assert not pod or not selector.items() <= whole["metadata"]["labels"].items()
        for container in pod.get("containers", []) + pod.get("initContainers", []):
            assert container["image"] in (
                "registry.example.com/npu-agent:0.1.0",
                "registry.k8s.io/kube-scheduler:v1.30.14",
                "docker.io/library/busybox:1.37.0",
            )


def test_the_rendered_file_has_namespaces_where_they_belong_and_makes_none() -> None:
    """kustomize would give policies one, as it does not know that they have none (its issue 6051).

    Deleting a namespace of its own would take other people's objects along.
    """
    for thing in objects((K8S / "npu-agent.yaml").read_text(encoding="utf-8")):
        assert ("namespace" in thing["metadata"]) is (thing["kind"] not in SCOPELESS)
        assert thing["kind"] != "Namespace"


@pytest.mark.parametrize("version", ["1.25", "1.26", "1.27", "1.28", "1.29"])
def test_the_docs_have_an_overlay_for_older_kubernetes(version: str, overlay: Overlay) -> None:
    page = (K8S.parent / "docs/install.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n[^`]*?(patches:\n  - target: { group.+?)```", page, re.DOTALL)
    made = overlay(**yaml.safe_load(text))
    for thing in made:
        check(thing, version)
    # Nothing else is left out, and Kubernetes 1.20 has no maxSurge.
    left_out = {thing["kind"] for thing in overlay()} - {thing["kind"] for thing in made}
    assert left_out == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    update = by_kind(made, "DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]
    assert update == {"maxUnavailable": 1}


def test_the_scheduler_takes_its_configuration(tmp_path: Path) -> None:
    """kube-scheduler itself reads the file, strictly, and says what it makes of it."""
    nowhere = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "none", "context": {"cluster": "none"}}],
        "current-context": "none",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(nowhere), encoding="utf-8")
    scheduler = config_of(objects(kustomize(K8S / "components" / "binpack-scheduler")))
    scheduler["clientConnection"] = {"kubeconfig": str(tmp_path / "kubeconfig")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(scheduler), encoding="utf-8")
    output(
        "kube-scheduler",
        f"--config={tmp_path}/config.yaml",
        "--authentication-skip-lookup=true",
        "--secure-port=0",
        f"--write-config-to={tmp_path}/seen.yaml",
    )
    seen = yaml.safe_load((tmp_path / "seen.yaml").read_text(encoding="utf-8"))
    (profile,) = seen["profiles"]
    score, everywhere = profile["plugins"]["score"], profile["plugins"]["multiPoint"]["enabled"]
    assert score["enabled"] == [{"name": "NodeResourcesFit", "weight": 100}]
    # A name that no plugin has would be taken, and do nothing.
    assert {p["name"] for p in score["disabled"]} < {p["name"] for p in everywhere}
    assert profile["schedulerName"] == "npu-binpack-scheduler"
    (fit,) = (p["args"] for p in profile["pluginConfig"] if p["name"] == "NodeResourcesFit")
    strategy = fit["scoringStrategy"]
    assert strategy["type"] == "RequestedToCapacityRatio"
    shape = strategy["requestedToCapacityRatio"]["shape"]
    assert shape == [{"utilization": 0, "score": 0}, {"utilization": 100, "score": 10}]
    weights = {resource["name"]: resource["weight"] for resource in strategy["resources"]}
    assert (weights.pop("cpu"), weights.pop("memory")) == (1, 1)
    assert set(weights.values()) == {100}
    assert seen["leaderElection"]["leaderElect"] is False


def test_the_docs_have_an_overlay_write_its_namespace_into_the_runbooks_address(
    overlay: Overlay,
) -> None:
    page = (K8S.parent / "docs/monitoring.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(replacements:.+?)```", page, re.DOTALL)
    made = overlay(["alerts", "own-namespace"], namespace="npus", **yaml.safe_load(text))
    rules = by_kind(made, "PrometheusRule")["spec"]["groups"][0]["rules"]
    urls = [rule["annotations"]["runbook_url"] for rule in rules if "alert" in rule]
    assert all(url.startswith("http://npu-agent.npus.svc:9100/runbook#npu") for url in urls)
