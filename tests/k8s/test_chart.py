"""The Helm chart makes what kustomize makes, and refuses wrong values in words."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_agent import __version__, config
from npu_agent.vendors import SPEC

from .conftest import Overlay
from .schemas import VERSIONS, check
from .tools import CHART, K8S, Object, by_kind, config_of, objects, output, pod_of, run

VALUES: dict[str, Object] = {
    "nodes-every": {"nodes": "every"},
    "nodes-nfd": {"nodes": "nfd"},
    "nodes-nfd-class": {"nodes": "nfd-class"},
    "nodes-label": {"nodes": "label"},
    "cdi": {"cdi": True},
    "dra": {"dra": {"enabled": True}},
    "impersonation": {"rbac": {"mode": "impersonation"}},
    "nfd-output": {"nfdOutput": True},
    "node-condition": {"nodeCondition": True},
    "eviction": {"rbac": {"mode": "impersonation"}, "eviction": True},
    "recursive-read-only": {"recursiveReadOnly": True},
    "selinux": {"seLinuxOptions": {"type": "container_device_plugin_t"}},
    "openshift": {"openshift": True},
    "network-policy": {"networkPolicy": {"enabled": True}},
    "podmonitor": {"podMonitor": {"enabled": True}},
    "servicemonitor": {"serviceMonitor": {"enabled": True}},
    "metrics-tls": {"metricsTLS": True},
    "metrics-authorization": {"metricsAuthorization": True},
    "alerts": {"prometheusRule": {"enabled": True}},
    "dashboard": {"dashboard": {"enabled": True}},
    "simulate": {"simulate": "warboy=2,rngd=1"},
}
"""The values that stand for each component."""
WITH = {"eviction": ["impersonation"]}
"""Components that come behind others."""
ALONE = ("simulate", "servicemonitor")
TOGETHER = [name for name in VALUES if not name.startswith("nodes-") and name not in ALONE]
"""Components that go with each other."""
EVERYTHING = functools.reduce(operator.or_, (VALUES[name] for name in TOGETHER), {"nodes": "every"})
DRA = {"dra": {"enabled": True}}
FILES = {"certFile": "/a", "keyFile": "/b"}
BY_DRA = {"name": "a/b", "family": "rngd", "api": "dra"}
INSTALLER = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart")
"""Labels that say who installed an object."""


def template(given: Mapping[str, Any], namespace: str = "kube-system") -> list[Object]:
    """What the chart makes of these values."""
    words = ("--namespace", namespace, "--values", "-", "--skip-tests")
    return objects(output("helm", "template", "any-name", CHART, *words, stdin=json.dumps(given)))


def comparable(things: list[Object]) -> dict[tuple[str, str, str], Object]:
    """Objects by kind, namespace and name.

    The config file is what it says, without comments; volumes, environment and rights have no
    order. Who installed it is another one.
    """
    found = {}
    for thing in deepcopy(things):
        labelled = [thing["metadata"]]
        if thing["kind"] == "DaemonSet":
            labelled.append(thing["spec"]["template"]["metadata"])
        for one in labelled:
            for label in INSTALLER:
                one["labels"].pop(label, None)
        if "config.yaml" in thing.get("data", {}):
            thing["data"]["config.yaml"] = yaml.safe_load(thing["data"]["config.yaml"])
        if thing["kind"] == "DaemonSet":
            pod = thing["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            container["env"] = [one for one in container["env"] if one["name"] != "HELM_RELEASE"]
            for named in (pod["volumes"], container["volumeMounts"], container["env"]):
                named.sort(key=lambda one: str(one["name"]))
        thing.get("rules", []).sort(key=str)
        meta = thing["metadata"]
        key = (thing["kind"], meta.get("namespace", ""), meta["name"])
        assert key not in found
        found[key] = thing
    return found


def test_the_defaults_are_the_kustomize_base(overlay: Overlay) -> None:
    assert comparable(template({})) == comparable(overlay())


@pytest.mark.parametrize("component", VALUES)
def test_a_value_is_its_component(component: str, overlay: Overlay) -> None:
    made = comparable(template(VALUES[component]))
    assert made == comparable(overlay([*WITH.get(component, ()), component]))
    assert made != comparable(template({}))


def test_all_values_together_in_another_namespace_with_another_image(overlay: Overlay) -> None:
    image = {"repository": "registry.example.com/npu-agent", "tag": "1.2.3"}
    # kustomize cannot have an address follow namespace and scheme.
    runbook = "http://npu-agent.kube-system.svc:9100/runbook"
    rule = {"enabled": True, "runbookBaseUrl": runbook}
    named = {"name": "npu-agent", "newName": image["repository"], "newTag": image["tag"]}
    parts = ["nodes-every", *TOGETHER]
    wanted = comparable(overlay(parts, namespace="npu-system", images=[named]))
    for (kind, _, name), thing in list(wanted.items()):
        if kind.startswith("ValidatingAdmissionPolicy") or kind in (
            "DeviceClass",
            "SecurityContextConstraints",
        ):
            # kustomize writes a namespace into these, which have none (its issue 6051).
            del wanted[kind, "npu-system", name]
            del thing["metadata"]["namespace"]
            wanted[kind, "", name] = thing
    made = template({**EVERYTHING, "image": image, "prometheusRule": rule}, "npu-system")
    assert comparable(made) == wanted
    for version in VERSIONS:
        for thing in made:
            check(thing, version)


def test_the_config_is_the_agents(tmp_path: Path) -> None:
    given = {
        "defaultPe": "Single",
        "resources": [{"name": "furiosa.ai/rngd", "family": "rngd", "coresPerDevice": 4}],
        "metrics": {"listen": "127.0.0.1:9200", "schema": "2025"},
        "labels": {"sets": ["beta", "current"]},
        "disabledDevices": [{"devName": "npu0", "nodeName": "worker-1"}],
    }
    made = template({"config": given})
    file = tmp_path / "config.yaml"
    file.write_text(by_kind(made, "ConfigMap")["data"]["config.yaml"], encoding="utf-8")
    config.load(file, SPEC)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["config"]
    assert config_of(made) == defaults | given


@pytest.mark.parametrize(
    ("metrics", "port", "probes"),
    [
        ({"listen": "[::]:9200"}, 9200, 9201),
        ({"listen": "127.0.0.1:9200"}, 9200, 9201),
        ({"listen": "127.0.0.1:9200", "probes": ":9300"}, 9200, 9300),
    ],
)
def test_the_ports_follow_the_config(metrics: Object, port: int, probes: int) -> None:
    made = template({"config": {"metrics": metrics}})
    (container,) = pod_of(made)["containers"]
    assert container["ports"] == [
        {"name": "metrics", "containerPort": port},
        {"name": "probes", "containerPort": probes},
    ]
    service = by_kind(made, "Service")
    assert service["spec"]["ports"][0]["port"] == port
    assert service["metadata"]["annotations"]["prometheus.io/port"] == str(port)


@pytest.mark.parametrize("more", [(), ("metrics-authorization",)], ids=["tls", "with a token"])
@pytest.mark.parametrize("monitor", ["podmonitor", "servicemonitor"])
def test_a_monitor_scrapes_by_https_where_that_is_served(
    monitor: str, more: tuple[str, ...], overlay: Overlay
) -> None:
    names = (monitor, "metrics-tls", *more)
    given = functools.reduce(operator.or_, (VALUES[name] for name in names))
    assert comparable(template(given)) == comparable(overlay(names))


def test_the_kubelets_directories_follow_the_config() -> None:
    config = {"pluginDir": "/var/lib/k0s/kubelet/device-plugins"}
    pod = pod_of(template({"config": config, "dra": {"enabled": True}}))
    paths = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    for name in ("device-plugins", "pod-resources"):
        assert paths[name] == mounts[name] == f"/var/lib/k0s/kubelet/{name}"
    assert paths["dra"] == mounts["dra"] == "/var/lib/k0s/kubelet/plugins/npu.furiosa.ai"
    assert (
        paths["dra-registry"] == mounts["dra-registry"] == "/var/lib/k0s/kubelet/plugins_registry"
    )


@pytest.mark.parametrize(
    ("given", "remedy", "message"),
    [
        ({"config": {"allocation": {"method": "cdi"}}}, {"cdi": True}, "cdi to true"),
        ({"config": {"labels": {"output": "nfd"}}}, {"nfdOutput": True}, "nfdOutput to true"),
        ({"config": {"metrics": {"tls": FILES}}}, {"metricsTLS": True}, "metricsTLS to true"),
        (
            {"config": {"health": {"condition": {"type": "a.example.com/B"}}}},
            {"nodeCondition": True},
            "nodeCondition to true",
        ),
        ({"config": {"allocation": {"api": "auto"}}}, DRA, "dra.enabled to true"),
        ({"config": {"resources": [BY_DRA]}}, DRA, "dra.enabled to true"),
        ({"dra": {"classes": True}}, {"dra": {"enabled": True, "classes": True}}, "dra.enabled to"),
        ({"eviction": True}, {"rbac": {"mode": "impersonation"}}, "rbac.mode to impersonation"),
    ],
)
def test_values_that_need_another_one_are_refused_without_it(
    given: Object, remedy: Object, message: str
) -> None:
    done = run("helm", "template", "x", CHART, "--values", "-", stdin=json.dumps(given))
    assert f"set {message}" in done.stderr
    assert len(done.stderr.splitlines()) < 10
    assert template(given | remedy)


@pytest.mark.parametrize(
    ("value", "version", "older"),
    [("dra.enabled", "1.34", "1.33.5"), ("dra.enabled=true,dra.classes", "1.36", "1.35.4")],
)
def test_dra_needs_a_version_of_kubernetes(value: str, version: str, older: str) -> None:
    words = ("template", "x", CHART, "--set", f"{value}=true", "--kube-version")
    assert run("helm", *words, f"{version}.0").returncode == 0
    done = run("helm", *words, older)
    name = value.rpartition(",")[2]
    assert f"{name} needs Kubernetes {version} or newer, and this is v{older}" in done.stderr


@pytest.mark.parametrize(
    ("version", "mode"),
    [("1.35.4", "policies"), ("1.36.0-rc.1", "impersonation"), ("v1.36.3+k3s1", "impersonation")],
)
def test_the_mode_auto_follows_the_version_of_the_cluster(version: str, mode: str) -> None:
    def roles(mode: str) -> list[Object]:
        given = ("--set", f"dra.enabled=true,rbac.mode={mode}", "--kube-version", version)
        made = objects(output("helm", "template", "x", CHART, *given))
        return [one for one in made if one["kind"] == "ClusterRole"]

    assert roles("auto") == roles(mode)
    assert roles("policies") != roles("impersonation")


def test_evictions_take_a_cluster_where_the_agent_acts_as_its_node() -> None:
    words = ("template", "x", CHART, "--set", "eviction=true,rbac.mode=auto", "--kube-version")
    assert run("helm", *words, "1.36.0").returncode == 0
    assert "needs Kubernetes 1.36 or newer" in run("helm", *words, "1.35.4").stderr


def test_the_classes_of_dra_are_those_of_the_component(overlay: Overlay) -> None:
    def classes(things: list[Object]) -> list[Object]:
        return sorted(
            ({**one, "metadata": one["metadata"]["name"]} for one in things
             if one["kind"] == "DeviceClass"),
            key=lambda one: str(one["metadata"]),
        )  # fmt: skip

    made = template({"dra": {"enabled": True, "classes": True}})
    assert classes(made) == classes(overlay(["dra", "dra-classes"]))


def test_with_dra_the_api_is_auto_unless_the_config_says_another() -> None:
    def api(config: Object) -> object:
        found = config_of(template({**DRA, "config": config}))
        # The rest of the config stays as it is.
        assert found["interval"] == 10
        assert found["allocation"].get("method") == config.get("allocation", {}).get("method")
        return found["allocation"]["api"]

    assert api({"allocation": {"method": "deviceNodes"}}) == "auto"
    assert api({"allocation": {"api": "device-plugin"}}) == "device-plugin"


def test_every_value_is_described() -> None:
    def undescribed(schema: Object, path: str) -> list[str]:
        found = []
        for name, part in schema.get("properties", {}).items():
            if "$ref" not in part and "description" not in part:
                found.append(f"{path}.{name}")
            found += undescribed(part, f"{path}.{name}") + undescribed(part.get("items", {}), name)
        return found

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert undescribed(schema, "") == []
    known = set(schema["properties"]) - {"enabled"}  # which Helm reads of a part
    assert known == set(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def test_the_policies_can_be_left_out(overlay: Overlay) -> None:
    made = comparable(template({"ownNodePolicy": False}))
    base = comparable(overlay())
    left_out = {key for key in base if key[0].startswith("ValidatingAdmissionPolicy")}
    assert len(left_out) == 4
    assert made == {key: base[key] for key in base if key not in left_out}


def test_helm_is_content() -> None:
    done = run("helm", "lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_versions_are_the_bases() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__
    for file in [K8S / "kustomization.yaml", *K8S.glob("components/*/kustomization.yaml")]:
        for image in yaml.safe_load(file.read_text(encoding="utf-8")).get("images", ()):
            if image["name"] == "npu-agent":
                assert image["newTag"] == __version__, file


def test_every_render_has_the_same_bytes() -> None:
    """Else Argo CD would find a difference at each look."""
    first, second = (
        output("helm", "template", "any", CHART, "--values", "-", stdin=json.dumps(EVERYTHING))
        for _ in range(2)
    )
    assert first == second
