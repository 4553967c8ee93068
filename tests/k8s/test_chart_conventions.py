"""Values that people know from other charts, and the chart by Helm 3."""

from __future__ import annotations

import json

import pytest
import yaml

from .test_chart import EVERYTHING, comparable, template
from .test_chart_values import hooks, refusal
from .tools import CHART, Object, by_kind, objects, output, pod_of, run


def test_a_config_map_that_exists_stands_in_place_of_the_config() -> None:
    made = template({"existingConfigMap": "my-config"})
    volumes = {volume["name"]: volume for volume in pod_of(made)["volumes"]}
    assert volumes["config"] == {"name": "config", "configMap": {"name": "my-config"}}
    assert "ConfigMap" not in {thing["kind"] for thing in made}


def test_the_pod_may_use_the_network_of_its_node() -> None:
    rolling = {"maxSurge": 0, "maxUnavailable": 1}
    given = {"hostNetwork": True, "updateStrategy": {"rollingUpdate": rolling}}
    pod = pod_of(template(given))
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod_of(template({**given, "dnsPolicy": "Default"}))["dnsPolicy"] == "Default"
    assert pod_of(template({"dnsPolicy": "Default"}))["dnsPolicy"] == "Default"
    assert not {"hostNetwork", "dnsPolicy"} & pod_of(template({})).keys()


def test_fields_of_the_probes_can_be_replaced() -> None:
    def probe(given: Object, name: str) -> object:
        (container,) = pod_of(template(given))["containers"]
        return container[name]

    assert probe({"livenessProbe": {"periodSeconds": 30}}, "livenessProbe") == {
        "httpGet": {"path": "/healthz", "port": "probes"},
        "periodSeconds": 30,
        "timeoutSeconds": 5,
        "failureThreshold": 3,
    }
    changed = probe({"startupProbe": {"initialDelaySeconds": 9}}, "startupProbe")
    assert isinstance(changed, dict)
    assert (changed["initialDelaySeconds"], changed["periodSeconds"]) == (9, 1)
    assert probe({"readinessProbe": {}}, "readinessProbe") == probe({}, "readinessProbe")


def test_pull_secrets_of_all_charts_and_of_this_one() -> None:
    given = {
        "global": {"imagePullSecrets": ["shared", {"name": "other"}]},
        "imagePullSecrets": [{"name": "own"}, {"name": "shared"}],
    }
    names = [{"name": "shared"}, {"name": "other"}, {"name": "own"}]
    assert pod_of(template(given))["imagePullSecrets"] == names
    (verify,) = hooks(given)
    assert verify["spec"]["imagePullSecrets"] == names


def test_annotations_of_the_daemon_set_are_not_its_pods() -> None:
    made = template({"daemonSetAnnotations": {"team": "ml"}})
    daemon_set = by_kind(made, "DaemonSet")
    assert daemon_set["metadata"]["annotations"] == {"team": "ml"}
    assert "team" not in daemon_set["spec"]["template"]["metadata"]["annotations"]


def test_the_service_is_labelled_annotated_or_left_out() -> None:
    annotations = {"prometheus.io/scrape": None, "team": "ml"}
    made = by_kind(
        template({"service": {"labels": {"tier": "node"}, "annotations": annotations}}), "Service"
    )
    assert made["metadata"]["labels"]["tier"] == "node"
    assert made["metadata"]["annotations"] == {
        "prometheus.io/scheme": "http",
        "prometheus.io/port": "9100",
        "prometheus.io/path": "/metrics",
        "team": "ml",
    }
    without = template({"service": {"enabled": False}})
    assert "Service" not in {thing["kind"] for thing in without}


@pytest.mark.parametrize(
    ("value", "endpoints"),
    [("podMonitor", "podMetricsEndpoints"), ("serviceMonitor", "endpoints")],
)
def test_relabelings_come_after_the_charts(value: str, endpoints: str) -> None:
    zone = {"sourceLabels": ["__meta_kubernetes_node_label_zone"], "targetLabel": "zone"}
    drop = {"action": "drop", "regex": "process_.*", "sourceLabels": ["__name__"]}
    values = {"enabled": True, "relabelings": [zone], "metricRelabelings": [drop]}

    def endpoint(given: Object) -> Object:
        monitor = by_kind(template({value: given}), value[0].upper() + value[1:])
        (found,) = monitor["spec"][endpoints]
        assert isinstance(found, dict)
        return found

    default, made = endpoint({"enabled": True}), endpoint(values)
    assert made["relabelings"] == [*default["relabelings"], zone]
    assert made["metricRelabelings"] == [drop]
    assert "metricRelabelings" not in default


def test_further_objects_belong_to_the_release() -> None:
    plain = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "plain"},
        "stringData": {"text": "{{ not a template }}"},
    }
    text = """\
apiVersion: v1
kind: Secret
metadata:
  name: {{ .Release.Name }}-made
"""
    made = template({"extraObjects": [plain, text]})
    secrets = {t["metadata"]["name"]: t for t in made if t["kind"] == "Secret"}
    assert secrets.keys() == {"plain", "any-name-made"}
    assert secrets["plain"] == plain


# Built from its module, this one takes an old cluster for granted.
SINCE = ("--kube-version", "1.37.0")


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_helm_3_makes_the_same(values: Object) -> None:
    words = ("template", "any-name", CHART, "--namespace", "kube-system", "--skip-tests")
    three = output("helm-3", *words, *SINCE, "--values", "-", stdin=json.dumps(values))
    assert comparable(objects(three)) == comparable(template(values))


def test_helm_3_refuses_the_same() -> None:
    for given in ({"nodes": "all"}, {"hostNetwork": True}, {"config": {"interval": 0}}):
        words = ("template", "x", CHART, *SINCE, "--values", "-")
        done = run("helm-3", *words, stdin=yaml.safe_dump(given))
        assert done.returncode != 0
        wanted = refusal(given).splitlines()[-1].rpartition(": ")[2]
        assert wanted in done.stderr


def test_helm_3_is_content() -> None:
    done = run("helm-3", "lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr
