"""k8s/ as kustomize makes it: generated files, components, overlays, all against the schemas."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from npu_agent import config
from npu_agent.vendors import REGISTRY

from .conftest import Overlay
from .manifests import generated
from .schemas import VERSIONS, check
from .tools import COMPONENTS, K8S, Object, kustomize, objects, output

STAND_ALONE = [
    name
    for name in COMPONENTS
    if yaml.safe_load((K8S / "components" / name / "kustomization.yaml").read_text())["kind"]
    == "Kustomization"
]
"""Components that are applied by themselves; the others are parts of an overlay."""
PARTS = [name for name in COMPONENTS if name not in STAND_ALONE]
PARTS_BUT_NODES = [name for name in PARTS if not name.startswith("nodes-")]
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


def by_kind(things: list[Object], kind: str) -> Object:
    (found,) = (thing for thing in things if thing["kind"] == kind)
    return found


def pod_of(things: list[Object]) -> Object:
    """The Pod of the agent's DaemonSet."""
    spec: Object = by_kind(things, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def terms(things: list[Object]) -> list[set[str]]:
    """The node affinity's terms, each as the expressions that have to hold."""
    affinity = pod_of(things)["affinity"]["nodeAffinity"]
    return [
        {f"{e['key']} {e['operator']} {','.join(e['values'])}" for e in term["matchExpressions"]}
        for term in affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    ]


def test_generated_files_are_current() -> None:
    stale = [
        str(path.relative_to(K8S))
        for path, text in generated().items()
        if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "run `make manifests`"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", STAND_ALONE)
def test_a_component_alone_is_valid(name: str, version: str) -> None:
    made = objects(kustomize(K8S / "components" / name))
    assert made
    for thing in made:
        check(thing, version)
        assert ("namespace" in thing["metadata"]) is (thing["kind"] not in SCOPELESS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", PARTS)
def test_a_component_with_the_base_is_valid(name: str, version: str, overlay: Overlay) -> None:
    made = overlay([name])
    assert made != overlay()
    for thing in made:
        check(thing, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_rendered_file_is_valid(version: str) -> None:
    for thing in objects((K8S / "npu-agent.yaml").read_text()):
        check(thing, version)


def test_an_own_namespace_is_made_by_the_overlays_name(overlay: Overlay) -> None:
    things = overlay(PARTS_BUT_NODES, namespace="npus")
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
    ids=str,
)
def test_where_it_runs(components: list[str], wanted: list[set[str]], overlay: Overlay) -> None:
    assert terms(overlay(components)) == wanted


def test_it_runs_everywhere(overlay: Overlay) -> None:
    assert "affinity" not in pod_of(overlay(["nodes-every"]))


def test_components_go_together(overlay: Overlay) -> None:
    things = overlay(PARTS_BUT_NODES)
    volumes = [volume["name"] for volume in pod_of(things)["volumes"]]
    assert {"cdi", "dra", "nfd"} < set(volumes)
    assert len(volumes) == len(set(volumes))


def test_dra_has_the_mount_of_cdi_with_it_or_without(overlay: Overlay) -> None:
    """Whichever of the two components comes first."""

    def mounts(components: list[str]) -> list[Object]:
        pod = pod_of(overlay(components))
        named = [*pod["volumes"], *pod["containers"][0]["volumeMounts"]]
        return sorted((one for one in named if one["name"] == "cdi"), key=str)

    assert len(mounts(["cdi"])) == 2
    assert mounts(["cdi"]) == mounts(["dra"]) == mounts(["cdi", "dra"]) == mounts(["dra", "cdi"])


def test_the_config_of_dra_is_the_bases_with_the_api(overlay: Overlay, tmp_path: Path) -> None:
    def config_of(components: list[str]) -> str:
        text = by_kind(overlay(components), "ConfigMap")["data"]["config.yaml"]
        assert isinstance(text, str)
        return text

    wanted = yaml.safe_load(config_of([])) | {"allocation": {"api": "auto"}}
    assert yaml.safe_load(config_of(["dra"])) == wanted
    file = tmp_path / "config.yaml"
    file.write_text(config_of(["dra"]))
    assert config.load(file, REGISTRY).config.allocation.api == "auto"


def test_a_config_of_the_overlay_replaces_that_of_dra(overlay: Overlay) -> None:
    own = "allocation: {api: dra}\n"
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "npu-device-plugin"},
        "data": {"config.yaml": own},
    }
    patches = [{"target": {"kind": "ConfigMap"}, "patch": yaml.safe_dump(config_map)}]
    made = by_kind(overlay(["dra"], patches=patches), "ConfigMap")
    assert made["data"] == {"config.yaml": own}


def test_the_kubelet_finds_the_dra_sockets_where_the_agent_has_them(overlay: Overlay) -> None:
    """The path of the service's socket is handed to the kubelet, which dials it on the host."""
    pod = pod_of(overlay(["dra"]))
    (container,) = pod["containers"]
    inside = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    outside = {one["name"]: one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}
    for name in ("dra", "dra-registry"):
        assert inside[name] == outside[name]
    environment = {one["name"]: one["valueFrom"]["fieldRef"] for one in container["env"]}
    assert environment["POD_UID"] == {"fieldPath": "metadata.uid"}


@pytest.mark.parametrize("name", STAND_ALONE)
def test_an_overlay_chooses_namespace_and_images(name: str, overlay: Overlay) -> None:
    made = overlay(
        resources=[f"components/{name}"],
        namespace="elsewhere",
        images=[
            {"name": "npu-agent", "newName": "registry.example.com/npu-agent"},
            {"name": "registry.k8s.io/kube-scheduler", "newTag": "v1.30.14"},
        ],
    )
    for thing in made:
        if thing["kind"] not in SCOPELESS:
            assert thing["metadata"]["namespace"] == "elsewhere"
        for subject in thing.get("subjects", ()):
            assert subject["namespace"] == "elsewhere"
        pod = thing.get("spec", {}).get("template", {}).get("spec", {})
        for container in pod.get("containers", []) + pod.get("initContainers", []):
            assert container["image"] in (
                "registry.example.com/npu-agent:0.1.0",
                "registry.k8s.io/kube-scheduler:v1.30.14",
            )


def test_no_component_is_found_by_the_agents_selectors(overlay: Overlay) -> None:
    """Its DaemonSet would adopt such a Pod, its Service and PodMonitor would send scrapes there."""
    selector = by_kind(overlay(), "DaemonSet")["spec"]["selector"]["matchLabels"]
    for name in STAND_ALONE:
        for thing in objects(kustomize(K8S / "components" / name)):
            pod = thing if thing["kind"] == "Pod" else thing.get("spec", {}).get("template")
            if pod:
                assert not selector.items() <= pod["metadata"]["labels"].items(), name


def test_the_rendered_policies_have_no_namespace() -> None:
    """kustomize gives them one, as it does not know that they have none (its issue 6051)."""
    rendered = objects((K8S / "npu-agent.yaml").read_text())
    policies = [t for t in rendered if t["kind"].startswith("ValidatingAdmissionPolicy")]
    assert len(policies) == 4
    assert not any("namespace" in policy["metadata"] for policy in policies)


def test_deleting_the_rendered_file_deletes_all_that_the_base_makes() -> None:
    def names(things: list[Object]) -> set[tuple[str, str, str]]:
        return {
            (t["kind"], t["metadata"].get("namespace", ""), t["metadata"]["name"]) for t in things
        }

    rendered = names(objects((K8S / "npu-agent.yaml").read_text()))
    assert rendered == names(objects(kustomize(K8S)))
    # Its own namespace would take other people's objects along.
    assert not any(kind == "Namespace" for kind, _, _ in rendered)


def test_the_scheduler_takes_its_configuration(tmp_path: Path) -> None:
    """kube-scheduler itself reads the file, strictly, and says what it makes of it."""
    nowhere = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "none", "context": {"cluster": "none"}}],
        "current-context": "none",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(nowhere))
    (map_,) = (
        thing
        for thing in objects(kustomize(K8S / "components" / "binpack-scheduler"))
        if thing["kind"] == "ConfigMap"
    )
    scheduler = yaml.safe_load(map_["data"]["config.yaml"])
    scheduler["clientConnection"] = {"kubeconfig": str(tmp_path / "kubeconfig")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(scheduler))
    output(
        "kube-scheduler",
        f"--config={tmp_path}/config.yaml",
        "--authentication-skip-lookup=true",
        "--secure-port=0",
        f"--write-config-to={tmp_path}/seen.yaml",
    )
    seen = yaml.safe_load((tmp_path / "seen.yaml").read_text())
    (profile,) = seen["profiles"]
    score, everywhere = profile["plugins"]["score"], profile["plugins"]["multiPoint"]["enabled"]
    assert score["enabled"] == [{"name": "NodeResourcesFit", "weight": 100}]
    # A name that no plugin has would be taken, and do nothing.
    assert {p["name"] for p in score["disabled"]} < {p["name"] for p in everywhere}
    assert profile["schedulerName"] == "npu-binpack-scheduler"
    (fit,) = (p["args"] for p in profile["pluginConfig"] if p["name"] == "NodeResourcesFit")
    assert fit["scoringStrategy"]["type"] == "MostAllocated"
    assert {"cpu", "memory"}.isdisjoint(r["name"] for r in fit["scoringStrategy"]["resources"])
    assert seen["leaderElection"]["leaderElect"] is False
