"""How Prometheus finds the agents: Service, PodMonitor, and what docs/monitoring.md says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from npu_agent.config import Config
from tests.monitoring.helpers import PAGE, RUNBOOK, manifest, needs_promtool, promtool, rules

_, PORT = Config().metrics.address


def _examples() -> list[dict[str, Any]]:
    """The pieces of YAML in the docs."""
    texts = re.findall(r"^```yaml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [each for text in texts for each in yaml.safe_load_all(text)]


def _example(key: str) -> dict[str, Any]:
    [found] = [example for example in _examples() if key in example]
    return found


def _pods() -> dict[str, str]:
    """The labels by which the agents' Pods are found."""
    labels: dict[str, str] = manifest("daemonset.yaml")["spec"]["selector"]["matchLabels"]
    return labels


def test_the_service_leads_to_every_agent() -> None:
    service = manifest("service.yaml")
    assert "service.yaml" in manifest("kustomization.yaml")["resources"]
    spec = service["spec"]
    assert spec["selector"] == _pods()
    assert spec["publishNotReadyAddresses"], "one that is not ready would not be scraped"
    [port] = spec["ports"]
    assert (port["port"], port["targetPort"]) == (PORT, "metrics")
    assert service["metadata"]["annotations"]["prometheus.io/port"] == str(PORT)


def test_the_podmonitor_leads_to_every_agent() -> None:
    """What its relabelings make of the labels is asked of a Prometheus: test_dashboard.py."""
    spec = manifest("components/podmonitor/podmonitor.yaml")["spec"]
    assert spec["selector"]["matchLabels"] == _pods()
    # What the rules call the agents' job.
    assert _pods()[spec["jobLabel"]] == "npu-agent"
    [endpoint] = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")
    assert endpoint["honorLabels"], "those of a card's holder"


@needs_promtool
def test_prometheus_takes_the_scrape_config_of_the_docs(tmp_path: Path) -> None:
    config = _example("scrape_configs")
    [job] = config["scrape_configs"]
    assert job["job_name"] == "npu-agent", "what the rules call it"
    assert job["honor_labels"]
    assert {rule.get("target_label") for rule in job["relabel_configs"]} == {None, "hostname"}
    # Debian's Prometheus is built without the discovery of Kubernetes.
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    promtool("check", "config", "prometheus.yaml", cwd=tmp_path)


def test_the_patch_of_the_docs_meets_the_rule_that_it_means() -> None:
    [patches] = [
        yaml.safe_load(patch["patch"])
        for example in _examples()
        for patch in example.get("patches", ())
        if patch["target"].get("kind") == "PrometheusRule"
    ]
    alert, limit = patches
    every = manifest("components/alerts/prometheusrule.yaml")["spec"]["groups"]
    place = re.fullmatch(r"/spec/groups/0/rules/(\d+)/alert", alert["path"])
    assert place
    assert every[0]["rules"][int(place[1])]["alert"] == alert["value"]
    assert limit["path"] == f"/spec/groups/0/rules/{place[1]}/expr"
    now = rules("alert")[alert["value"]]["expr"]
    assert limit["value"].rpartition(" ")[0] == now.rpartition(" ")[0]


def test_the_docs_lists_of_alerts_are_complete() -> None:
    lists = re.findall(r"^- `(\w+)`(.+?)(?=^- |^$)", RUNBOOK, re.MULTILINE | re.DOTALL)
    listed = [
        (name, severity) for severity, text in lists for name in re.findall(r"\[(Npu\w+)\]", text)
    ]
    of_rules = [(name, rule["labels"]["severity"]) for name, rule in rules("alert").items()]
    assert sorted(listed) == sorted(of_rules)
