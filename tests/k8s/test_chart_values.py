"""The values that every chart has, and those of our own parts: what each of them changes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_agent.people.simulator import parse_cards
from npu_agent.people.simulator.families import FAMILIES

from .schemas import check
from .test_chart import comparable, template
from .tools import CHART, K8S, Object, by_kind, config_of, objects, output, pod_of, run

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
SELECTOR = {"app.kubernetes.io/name": "npu-agent"}
"""What releases before this one select by. A DaemonSet's selector cannot change, so it may never
have more: an upgrade would be refused."""


def image(**values: Any) -> object:
    return pod_of(template(values))["containers"][0]["image"]


def refusal(given: Mapping[str, Any]) -> str:
    """What Helm says of values that it refuses."""
    done = run("helm", "template", "x", CHART, "--values", "-", stdin=json.dumps(given))
    assert done.returncode != 0
    return done.stderr


def selectors(made: list[Object]) -> list[object]:
    """By what four objects find the agent's Pods."""
    return [
        by_kind(made, "DaemonSet")["spec"]["selector"]["matchLabels"],
        by_kind(made, "Service")["spec"]["selector"],
        by_kind(made, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        by_kind(made, "PodMonitor")["spec"]["selector"]["matchLabels"],
    ]


def test_every_object_has_the_recommended_labels() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    made = template({"dra": {"enabled": True}, "prometheusRule": {"enabled": True}})
    labelled = [thing["metadata"] for thing in made]
    for labels in (one["labels"] for one in labelled):
        assert labels["helm.sh/chart"] == f"npu-agent-{chart['version']}"
    labelled.append(by_kind(made, "DaemonSet")["spec"]["template"]["metadata"])
    for labels in (one["labels"] for one in labelled):
        assert (
            labels.items()
            >= {
                **SELECTOR,
                "app.kubernetes.io/instance": "any-name",
                "app.kubernetes.io/version": chart["appVersion"],
                "app.kubernetes.io/component": "node-agent",
                "app.kubernetes.io/part-of": "npu-agent",
                "app.kubernetes.io/managed-by": "Helm",
            }.items()
        )


def test_labels_and_annotations_of_ones_own() -> None:
    given: Object = {
        "commonLabels": {"cost": "42", "app.kubernetes.io/part-of": "platform"},
        "podLabels": {"team": "ml"},
        "podAnnotations": {"example.com/why": "Because: of\nthat"},
        "dashboard": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "podMonitor": {"enabled": True},
    }
    made = template(given)
    for thing in made:
        labels = thing["metadata"]["labels"]
        assert labels["cost"] == "42"
        assert labels["app.kubernetes.io/part-of"] == "platform"
        assert "team" not in labels
    pod = by_kind(made, "DaemonSet")["spec"]["template"]["metadata"]
    assert pod["labels"].items() >= {"cost": "42", "team": "ml", **SELECTOR}.items()
    assert pod["annotations"] == {
        "kubectl.kubernetes.io/default-container": "npu-agent",
        **given["podAnnotations"],
    }
    assert selectors(made) == [SELECTOR] * 4


def test_a_name_override_is_in_every_name_and_reference() -> None:
    everything = {
        "dra": {"enabled": True},
        "metricsAuthorization": True,
        "networkPolicy": {"enabled": True},
        "podMonitor": {"enabled": True},
        "dashboard": {"enabled": True},
        "openshift": True,
        "prometheusRule": {"enabled": True},
    }
    made = template({**everything, "fullnameOverride": "cards"}, namespace="npus")
    # Values that are by themselves: the config file, texts for people.
    names = {thing["metadata"]["name"] for thing in made} - {"npu.furiosa.ai"}
    assert all(name == "cards" or name.startswith("cards-") for name in names), names
    for thing in made:
        for role in [thing["roleRef"]] if "roleRef" in thing else []:
            assert role["name"] in names | {"system:auth-delegator"}
        for subject in thing.get("subjects", ()):
            assert (subject["name"], subject["namespace"]) == ("cards", "npus")
        spec = thing.get("spec", {})
        assert spec.get("policyName", "cards-") in names | {"cards-"}
        for condition in spec.get("matchConditions", ()):
            if "userInfo" in condition["expression"]:
                assert condition["expression"].endswith(r":[^:]+:cards$')")
    pod = pod_of(made)
    assert pod["serviceAccountName"] == "cards"
    (config,) = (volume for volume in pod["volumes"] if volume["name"] == "config")
    assert config["configMap"]["name"] == "cards-config"
    scc = next(t for t in made if t["metadata"]["name"] == "cards-scc" and "rules" in t)
    assert scc["rules"][0]["resourceNames"] == ["cards"]
    assert runbook_of(made).startswith("http://cards.npus.svc:9100/runbook#npu")
    # And nothing of it is in a selector.
    assert by_kind(made, "DaemonSet")["spec"]["selector"] == {"matchLabels": SELECTOR}


def test_a_name_override_is_in_selectors_and_in_the_job_that_alerts_know() -> None:
    given = {
        "nameOverride": "cards",
        "podMonitor": {"enabled": True},
        "networkPolicy": {"enabled": True},
    }
    made = template({**given, "prometheusRule": {"enabled": True}})
    assert by_kind(made, "DaemonSet")["metadata"]["name"] == "cards"
    assert selectors(made) == [{"app.kubernetes.io/name": "cards"}] * 4
    rules = yaml.safe_dump(by_kind(made, "PrometheusRule")["spec"])
    assert 'job="cards"' in rules
    assert 'job="npu-agent"' not in rules


@pytest.mark.parametrize(
    ("repository", "registry", "wanted"),
    [
        ("npu-agent", "", "npu-agent:1"),
        ("npu-agent", "mirror.example.com/all/", "mirror.example.com/all/npu-agent:1"),
        ("team/npu-agent", "mirror:5000", "mirror:5000/team/npu-agent:1"),
        ("registry.example.com/team/npu-agent", "mirror:5000", "mirror:5000/team/npu-agent:1"),
        ("localhost/npu-agent", "mirror.example.com", "mirror.example.com/npu-agent:1"),
        ("registry:5000/npu-agent", "", "registry:5000/npu-agent:1"),
    ],
)
def test_the_registry_that_all_charts_share(repository: str, registry: str, wanted: str) -> None:
    given = {"repository": repository, "tag": "1", "digest": DIGEST}
    made = image(**{"image": given, "global": {"imageRegistry": registry}})
    assert made == f"{wanted}@{DIGEST}"


def test_more_of_everything_in_the_pod() -> None:
    volume = {"name": "extra", "configMap": {"name": "mine"}}
    mount = {"name": "extra", "mountPath": "/extra", "readOnly": True}
    variable = {"name": "TZ", "value": "Asia/Seoul"}
    replaced: Object = {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"pool": "npu", "kubernetes.io/os": "linux"},
        "tolerations": [{"key": "npu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    affinity: Object = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
    given = {
        **replaced,
        "extraArgs": ["--log-level=debug"],
        "extraEnv": [variable],
        "extraVolumes": [volume],
        "extraVolumeMounts": [mount],
        "affinity": affinity,
        "priorityClassName": "",
        "resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "256Mi"}},
        "securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "npu"}},
        "podSecurityContext": {"supplementalGroups": [5]},
    }
    made = template(given)
    check(by_kind(made, "DaemonSet"), "1.37")
    pod, base = pod_of(made), pod_of(template({}))
    (container,), (before,) = pod.pop("containers"), base.pop("containers")
    assert container.pop("args") == [*before.pop("args"), "--log-level=debug"]
    assert container.pop("env") == [*before.pop("env"), variable]
    assert container.pop("volumeMounts") == [*before.pop("volumeMounts"), mount]
    assert container.pop("resources") == {
        "requests": {"cpu": "50m", "memory": before.pop("resources")["requests"]["memory"]},
        "limits": {"memory": "256Mi"},
    }
    context = before.pop("securityContext") | given["securityContext"]
    assert container.pop("securityContext") == context
    assert container == before
    assert pod.pop("volumes") == [*base.pop("volumes"), volume]
    assert pod.pop("affinity") == {**base.pop("affinity"), **affinity}
    context = base.pop("securityContext") | given["podSecurityContext"]
    assert pod.pop("securityContext") == context
    del base["priorityClassName"], base["tolerations"]
    assert pod == base | replaced


def test_a_node_affinity_of_ones_own() -> None:
    terms = [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    given = {"affinity": {"nodeAffinity": required}}
    assert "set nodes to every" in refusal(given)
    assert pod_of(template({**given, "nodes": "every"}))["affinity"] == given["affinity"]


def test_a_list_of_daemonsets_shows_where_it_runs() -> None:
    """`kubectl get daemonset` has a column for the node selector, and none for affinity."""
    pod = pod_of(template({"nodes": "label", "nodeSelector": {"pool": "npu"}}))
    os = {"kubernetes.io/os": "linux"}
    assert pod["nodeSelector"] == {"npu-agent/enabled": "true", "pool": "npu", **os}


def test_update_strategies() -> None:
    def strategy(**given: Any) -> object:
        return by_kind(template({"updateStrategy": given}), "DaemonSet")["spec"]["updateStrategy"]

    assert strategy(type="OnDelete") == {"type": "OnDelete"}
    assert strategy(rollingUpdate={"maxSurge": 0, "maxUnavailable": "10%"}) == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "10%"},
    }


def test_an_account_of_ones_own_is_held_to_its_node_too() -> None:
    given = {"serviceAccount": {"create": False, "name": "my.account"}, "rbac": {"create": False}}
    made = template(given)
    kinds = {thing["kind"] for thing in made}
    assert not kinds & {"ServiceAccount", "ClusterRole", "ClusterRoleBinding"}
    assert pod_of(made)["serviceAccountName"] == "my.account"
    conditions = [c for t in made for c in t.get("spec", {}).get("matchConditions", ())]
    assert len(conditions) == 2
    for condition in conditions:
        found = re.search(r"matches\('(.*)'\)", condition["expression"])
        assert found
        assert re.search(found[1], "system:serviceaccount:kube-system:my.account")
        assert not re.search(found[1], "system:serviceaccount:kube-system:my-account")
    noted = template({"serviceAccount": {"annotations": {"a.example.com/b": "c"}}})
    assert by_kind(noted, "ServiceAccount")["metadata"]["annotations"] == {"a.example.com/b": "c"}


def test_the_kubelets_directory() -> None:
    root = "/var/snap/microk8s/common/var/lib/kubelet"
    given = {"kubeletRootDir": f"{root}/", "dra": {"enabled": True}}
    made = template(given)
    config = config_of(made)
    assert config["pluginDir"] == f"{root}/device-plugins"
    by_config = template({"config": {"pluginDir": config["pluginDir"]}, "dra": {"enabled": True}})
    assert comparable(made) == comparable(by_config)


def test_a_pod_monitor_where_prometheus_finds_it() -> None:
    values = {"interval": "1m", "labels": {"release": "kps"}, "namespace": "monitoring"}
    made = template({"podMonitor": {"enabled": True, **values}}, namespace="npus")
    monitor = by_kind(made, "PodMonitor")
    assert monitor["metadata"]["namespace"] == "monitoring"
    assert monitor["metadata"]["labels"]["release"] == "kps"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["npus"]}
    assert monitor["spec"]["podMetricsEndpoints"][0]["interval"] == "1m"


def test_a_dashboard_where_grafana_finds_it() -> None:
    values = {"labels": {"dashboards": "yes"}, "folder": "NPU & more"}
    meta = one_dashboard({"enabled": True, **values})["metadata"]
    assert meta["labels"].items() >= {"dashboards": "yes", "grafana_dashboard": "1"}.items()
    assert meta["annotations"] == {"grafana_folder": "NPU & more"}
    made = one_dashboard({"enabled": True})
    assert "annotations" not in made["metadata"]
    assert [json.loads(text)["uid"] for text in made["data"].values()] == [
        "npu-agent",
        "npu-agent-usage",
    ]


def one_dashboard(values: Object) -> Object:
    made = template({"dashboard": values})
    return next(thing for thing in made if thing["metadata"]["name"] == "npu-agent-dashboard")


def test_clients_that_the_network_policy_admits() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"name": "openshift-monitoring"}}}]
    made = template({"networkPolicy": {"enabled": True, "from": peers}})
    (rule,) = by_kind(made, "NetworkPolicy")["spec"]["ingress"]
    assert rule == {"from": peers, "ports": [{"port": "metrics", "protocol": "TCP"}]}


def alerts(**values: Any) -> dict[str, Object]:
    """The alerts that the chart makes, by name."""
    made = template({"prometheusRule": {"enabled": True, **values}})
    rules = by_kind(made, "PrometheusRule")["spec"]["groups"][0]["rules"]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def test_a_threshold_is_in_its_own_alert_and_in_its_description() -> None:
    """And the component has the chart's defaults: test_chart compares the two."""
    default = alerts()
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    names = list(values["prometheusRule"]["thresholds"])
    made = alerts(thresholds={name: 1000.5 + index for index, name in enumerate(names)})
    changed = {name for name in made if made[name]["expr"] != default[name]["expr"]}
    assert changed == set(names)
    for index, name in enumerate(names):
        limit = f"{1000.5 + index}"
        was = str(values["prometheusRule"]["thresholds"][name])
        assert made[name]["expr"].replace(limit, was) == default[name]["expr"]
        said = made[name]["annotations"]["description"]
        assert said.replace(limit, was) == default[name]["annotations"]["description"]


def test_alerts_that_are_not_wanted_are_not_there() -> None:
    assert alerts().keys() - alerts(disabled=["NpuErrorsRising"]).keys() == {"NpuErrorsRising"}


def test_the_dashboard_has_the_runbook_of_the_alerts() -> None:
    made = template({"dashboard": {"enabled": True}}, namespace="npus")
    (dashboard,) = (thing for thing in made if thing["metadata"]["name"] == "npu-agent-dashboard")
    text = dashboard["data"]["npu-agent.json"]
    assert "http://npu-agent.npus.svc:9100/runbook" in text
    assert "npu-agent.kube-system" not in text


def notes(**given: Any) -> str:
    """What Helm says after an installation."""
    words = ("install", "x", CHART, "--dry-run=client", "--values", "-")
    return output("helm", *words, stdin=json.dumps(given)).partition("NOTES:")[2]


def test_the_notes_name_what_the_defaults_leave_open() -> None:
    rules = {"prometheusRule": {"enabled": True}}
    assert "a name without a registry" in notes()
    assert "For a phone, set prometheusRule.runbookBaseUrl" in notes(**rules)
    copy = {"prometheusRule": {"enabled": True, "runbookBaseUrl": "https://example.com/alerts.md"}}
    said = notes(**copy, image={"repository": "registry.example.com/npu-agent"})
    assert "registry" not in said.replace("registry.example.com", "")
    assert "For a phone" not in said


def test_alerts_lead_to_a_runbook_and_a_dashboard() -> None:
    pages = {"runbookBaseUrl": "https://git.example.com/docs/alerts.md"}
    made = alerts(**pages, dashboardUrl="https://grafana.example.com/d/npu-agent")
    for name, rule in made.items():
        assert rule["annotations"]["runbook_url"] == f"{pages['runbookBaseUrl']}#{name.lower()}"
        assert rule["annotations"]["dashboard_url"] == (
            "https://grafana.example.com/d/npu-agent"
            "{{ with $labels.hostname }}?var-node={{ . }}"
            "{{ with $labels.cluster }}&var-cluster={{ . }}{{ end }}{{ end }}"
        )
    assert not any("dashboard_url" in rule["annotations"] for rule in alerts().values())
    tls = template({"prometheusRule": {"enabled": True}, "metricsTLS": True}, namespace="npus")
    assert runbook_of(tls).startswith("https://npu-agent.npus.svc:9100/runbook#")


def runbook_of(made: list[Object]) -> str:
    """Where the last alert leads to."""
    rules = by_kind(made, "PrometheusRule")["spec"]["groups"][0]["rules"]
    (*_, url) = [rule["annotations"]["runbook_url"] for rule in rules if "alert" in rule]
    return str(url)


def hooks(given: Object) -> list[Object]:
    """What `helm test` makes."""
    words = ("template", "any-name", CHART, "--namespace", "npus", "--values", "-")
    made = objects(output("helm", *words, stdin=json.dumps(given)))
    return [t for t in made if t["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]


def verify_job(installed: list[Object]) -> list[Object]:
    """The Job that k8s/verify.gotmpl makes of the agent's DaemonSet; no cluster is asked."""
    words = ("label", "--local", "--filename=-", "a=b", "--output")
    template = f"go-template-file={K8S / 'verify.gotmpl'}"
    agent = json.dumps(by_kind(installed, "DaemonSet"))
    return objects(output("kubectl", *words, template, stdin=agent))


def test_the_verify_job_has_image_secrets_account_and_namespace_of_the_agent() -> None:
    given = {
        "image": {"repository": "registry.example.com/npu-agent", "tag": "1"},
        "imagePullSecrets": [{"name": "one"}, {"name": "two"}],
        "serviceAccount": {"name": "other"},
    }
    (job,) = verify_job(template(given, namespace="npus"))
    check(job, "1.30")
    pod = job["spec"]["template"]["spec"]
    assert job["metadata"]["namespace"] == "npus"
    assert pod["containers"][0]["image"] == "registry.example.com/npu-agent:1"
    assert pod["imagePullSecrets"] == given["imagePullSecrets"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("other", False)
    assert not SELECTOR.items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_helms_test_is_the_verify_job() -> None:
    (pod,) = hooks({})
    check(pod, "1.30")
    # Helm uninstalls no hooks, so that one that succeeded must not stay.
    policy = pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
    assert policy == "before-hook-creation,hook-succeeded"
    (job,) = verify_job(template({}))
    check(job, "1.30")
    wanted = job["spec"]["template"]["spec"]
    # Helm knows the pull secrets by its values, and needs no account for them.
    assert (wanted.pop("serviceAccountName"), wanted.pop("imagePullSecrets")) == ("npu-agent", [])
    assert pod["spec"] == wanted
    assert not SELECTOR.items() <= pod["metadata"]["labels"].items()


def test_helms_test_asks_for_what_is_offered() -> None:
    (pod,) = hooks({"config": {"resources": [{"name": "a.example/b", "family": "rngd"}]}})
    assert pod["spec"]["containers"][0]["resources"]["limits"]["a.example/b"] == 1
    made = hooks({"dra": {"enabled": True}})
    for thing in made:
        check(thing, "1.37")
    claim, pod = sorted(made, key=lambda thing: thing["kind"] == "Pod")
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "npu.furiosa.ai"}
    (asked,) = pod["spec"]["resourceClaims"]
    assert asked["resourceClaimTemplateName"] == claim["metadata"]["name"]
    container = pod["spec"]["containers"][0]
    assert container["resources"]["claims"] == [{"name": asked["name"]}]
    assert list(container["resources"]["limits"]) == ["memory"]
    (pod,) = hooks({"dra": {"enabled": True, "classes": True}, "openshift": True})
    assert pod["spec"]["serviceAccountName"] == "npu-agent"  # whose Pods may have uid 0 there
    assert pod["spec"]["containers"][0]["resources"]["limits"]["beta.furiosa.ai/npu"] == 1


def test_wrong_values_are_refused_with_their_places() -> None:
    """Helm names all that the schema refuses in one message."""
    said = refusal(
        {
            "image": {"tga": "1", "tag": 0.1},
            "nodes": "all",
            "podmonitor": True,
            "config": {"defaultPe": "Both", "interval": 0, "health": {"failures": "2"}, "x": 1},
            "dra": True,
            "podAnnotations": {"a b": "c"},
            "extraEnv": [{"value": "x"}],
            "kubeletRootDir": "kubelet",
            "simulate": {"warboy": 2},
            "livenessProbe": {"httpGet": {}},
            "extraObjects": [{"kind": "ConfigMap"}],
            "global": {"imagePullSecrets": [{"key": "x"}]},
            "networkPolicy": {"from": [{}]},
            "prometheusRule": {
                "disabled": ["NpuHot"],
                "thresholds": {"NpuTemperatureHigh": "90", "NpuAgentDown": 1},
            },
        }
    )
    for message in (
        "at '/image': additional properties 'tga' not allowed",
        "at '/image/tag': got number, want string",
        "'any', 'every', 'nfd', 'nfd-class', 'label'",
        "additional properties 'podmonitor' not allowed",
        "at '/config': additional properties 'x' not allowed",
        "at '/config/defaultPe': value must be one of",
        "at '/config/interval': minimum: got 0, want 0.1",
        "at '/config/health/failures': got string",
        "at '/dra': got boolean, want object",
        "at '/podAnnotations': additional properties 'a b' not allowed",
        "at '/extraEnv/0': missing property 'name'",
        "at '/kubeletRootDir': 'kubelet' does not match pattern",
        "at '/simulate': got object, want string",
        "at '/livenessProbe': additional properties 'httpGet' not allowed",
        "at '/extraObjects/0': missing properties 'apiVersion', 'metadata'",
        "at '/global/imagePullSecrets/0': additional properties 'key' not allowed",
        "at '/networkPolicy/from/0': minProperties",
        "at '/prometheusRule/disabled/0': value must be one of 'NpuCardUnhealthy'",
        "at '/prometheusRule/thresholds/NpuTemperatureHigh': got string, want number",
        "at '/prometheusRule/thresholds': additional properties 'NpuAgentDown' not allowed",
    ):
        assert message in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"extraEnv": [{"name": "NODE_NAME"}]}, "extraEnv has NODE_NAME, which the chart sets"),
        ({"extraVolumes": [{"name": "dev"}]}, "extraVolumes has dev, which is a volume"),
        (
            {"extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]},
            "extraVolumeMounts has x, and extraVolumes has no volume of that name: add it",
        ),
        (
            {"kubeletRootDir": "/a", "config": {"pluginDir": "/b"}},
            "remove config.pluginDir, which is then /a/device-plugins",
        ),
        (
            {"updateStrategy": {"rollingUpdate": {"maxUnavailable": 1}}},
            "has maxSurge 1 and maxUnavailable 1, and Kubernetes takes one of the two",
        ),
        (
            {"openshift": True, "securityContext": {"seLinuxOptions": {"type": "a"}}},
            "securityContext.seLinuxOptions is set by the value seLinuxOptions: give it there",
        ),
        (
            {"simulate": "wrboy=2"},
            'simulate has the family "wrboy", and there are warboy and rngd: write it as',
        ),
        ({"simulate": "warboy=1,"}, 'simulate has the family "", and there are warboy and rngd'),
        ({"simulate": "warboy=1=2"}, 'simulate has "1=2", which does not name numbers of cards'),
        ({"simulate": "warboy=60, rngd=5"}, "simulate asks for 65 cards, and a node has 64 at"),
        (
            {"simulate": "rngd", "nodes": "nfd"},
            "and nodes: nfd takes those that have some: set nodes to any, every or label",
        ),
        ({"simulate": "rngd", "extraEnv": [{"name": "SIMULATE"}]}, "extraEnv has SIMULATE"),
        ({"serviceAccount": {"create": False}}, "set serviceAccount.name to an account"),
        (
            {"existingConfigMap": "mine", "config": {"defaultPe": "Single"}},
            "existingConfigMap is mine and config has values too",
        ),
        (
            {"config": {"metrics": {"probes": "127.0.0.1:9101"}}},
            "config.metrics.probes is 127.0.0.1:9101, where no kubelet reaches it: leave out the",
        ),
        (
            {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}},
            "would have each agent scraped twice: set one of both to false",
        ),
        (
            {"serviceMonitor": {"enabled": True}, "service": {"enabled": False}},
            "finds the agents by their Service: set service.enabled to true, or use podMonitor",
        ),
        *(
            (
                {value: {"enabled": True}, "config": {"metrics": {"listen": "127.0.0.1:9100"}}},
                f"where no Prometheus reaches it, and {value}.enabled is for one that does",
            )
            for value in ("podMonitor", "serviceMonitor", "prometheusRule")
        ),
        (
            {"prometheusRule": {"enabled": True}, "service": {"enabled": False}},
            "set prometheusRule.runbookBaseUrl to a copy of docs/alerts.md, or service.enabled",
        ),
        ({"hostNetwork": True}, "set updateStrategy.rollingUpdate.maxSurge to 0 and maxUnavail"),
        ({"podLabels": {"app.kubernetes.io/name": "x"}}, "podLabels may not have app.kubernetes"),
        ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "commonLabels may not have app.kub"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_values_that_contradict_each_other_are_refused(
    given: Mapping[str, Any], message: str
) -> None:
    said = refusal(given)
    assert message in said
    assert len(said.splitlines()) < 10


@pytest.mark.parametrize("wanted", [",".join(FAMILIES), *FAMILIES, "warboy = 2, rngd=1", "rngd=64"])
def test_the_cards_that_the_agent_takes_are_those_that_the_chart_takes(wanted: str) -> None:
    assert parse_cards(wanted)
    container = pod_of(template({"simulate": wanted}))["containers"][0]
    assert {"name": "SIMULATE", "value": wanted} in container["env"]


def keys(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Each key of values.yaml, and each below one."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys(value, (*path, key))


VALUES_FILE = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
LEFT_OUT = ("resources", "securityContext", "podSecurityContext")
"""What is handed to Kubernetes as it is: a null below it leaves out the field, as Helm has it."""


@pytest.mark.parametrize("key", [*keys(VALUES_FILE)], ids=".".join)
def test_a_value_that_is_null_is_its_default(key: tuple[str, ...]) -> None:
    """Helm removes such a key: templates would look for what is not there."""
    given: Any = None
    for name in reversed(key):
        given = {name: given}
    made = template(given)
    if key[0] in LEFT_OUT and len(key) > 1:
        assert "<nil>" not in json.dumps(made)
    else:
        assert made == template({})


UMBRELLA: dict[str, tuple[Object, int]] = {
    "nothing given": ({}, 1),
    "its condition is true": ({"npu-agent": {"enabled": True}}, 1),
    "its condition is false": ({"npu-agent": {"enabled": False}}, 0),
    "its tag": ({"tags": {"accelerators": True}}, 1),
    "another chart's globals": ({"global": {"storageClass": "fast", "a": {"b": "c"}}}, 1),
    "a null below it": ({"npu-agent": {"affinity": None}}, 1),
}


@pytest.mark.parametrize(("given", "count"), UMBRELLA.values(), ids=UMBRELLA)
def test_the_chart_is_a_part_of_another_one(given: Object, count: int, tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "charts/npu-agent")
    part = {"name": "npu-agent", "version": ">=0.0.0-0", "condition": "npu-agent.enabled"}
    parts = [{**part, "tags": ["accelerators"]}]
    chart = {"apiVersion": "v2", "name": "platform", "version": "0.1.0", "dependencies": parts}
    (tmp_path / "Chart.yaml").write_text(json.dumps(chart), encoding="utf-8")
    made = objects(
        output("helm", "template", "x", tmp_path, "--values", "-", stdin=json.dumps(given))
    )
    assert sum(thing["kind"] == "DaemonSet" for thing in made) == count


@pytest.mark.parametrize("classes", [False, True])
def test_two_releases_have_no_object_in_common(*, classes: bool) -> None:
    on = ("prometheusRule", "podMonitor", "dashboard", "networkPolicy")
    given = {"openshift": True, "nodes": "every", **{value: {"enabled": True} for value in on}}
    dra = {"enabled": True, "classes": classes}
    first = template({**given, "dra": dra})
    second = template({**given, "nameOverride": "npu-b", "dra": {**dra, "deviceClasses": False}})
    names = [
        {(thing["kind"], thing["metadata"]["name"]) for thing in made} for made in (first, second)
    ]
    assert names[0] & names[1] == set()
    assert ("DeviceClass", "npu.furiosa.ai") in names[0]
