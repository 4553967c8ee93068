"""The alert rules: promtool's own unit tests (alerts/*.yaml), and that none is forgotten."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_agent.core.hardware import Cause
from npu_agent.wording import ENGLISH
from tests.monitoring.helpers import (
    DASHBOARDS,
    PAGE,
    RUNBOOK,
    exported,
    metrics_of,
    needs_promtool,
    panels,
    promtool,
    queries_within,
    rules,
    write_rules,
)

TESTS = sorted((Path(__file__).parent / "alerts").glob("*.yaml"))
ALERTS = rules("alert")


@needs_promtool
def test_promtool_finds_no_fault(tmp_path: Path) -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", write_rules(tmp_path), cwd=tmp_path)


@needs_promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(tmp_path: Path, path: Path) -> None:
    write_rules(tmp_path)
    shutil.copy(path, tmp_path)
    promtool("test", "rules", path.name, cwd=tmp_path)


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_is_tested_before_while_and_after(alert: str) -> None:
    courses = []
    for path in TESTS:
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            asked = [each for each in test.get("alert_rule_test", ()) if each["alertname"] == alert]
            courses.append("".join("fires " if each["exp_alerts"] else "- " for each in asked))
    assert any(re.fullmatch(r"- (fires )+- ", course) for course in courses)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    runbook = "http://npu-agent.kube-system.svc:9100/runbook"
    assert rule["annotations"]["runbook_url"] == f"{runbook}#{alert.lower()}"
    [section] = re.findall(rf"^## {alert}\n(.+?)(?=^##|\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert section.startswith(f"\n*{rule['labels']['severity']}*: "), "its severity comes first"
    parts = re.findall(r"^- \*\*(\w+)\*\*: ", section, re.MULTILINE)
    assert parts in (["Check", "Fix"], ["Fix"])
    if alert != "NpuCardUnhealthy":
        # A pager shows it where no link opens.
        assert rule["annotations"]["description"].endswith(f" Fix: {first_step(section)}.")


def first_step(section: str) -> str:
    """The first sentence of an alert's *Fix*, without marks; a command behind it is left out."""
    found = re.search(r"\*\*Fix\*\*: (.+?)(?:\.(?=\s)|:(?=\s+`|\n))", section, re.DOTALL)
    assert found
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", found[1])
    return " ".join(re.sub("[`*]", "", text).split())


def test_the_alert_of_a_card_has_the_words_of_the_status_page_for_its_reason() -> None:
    description = ALERTS["NpuCardUnhealthy"]["annotations"]["description"]
    for cause in Cause:
        words = ENGLISH.of_cause(cause)
        said = f"{words.means}. Fix: {words.remedy.replace('`', '')}"
        assert f'if eq . "{cause.value}" }}}}{said} {{{{- else' in description, cause


def test_rules_ask_for_series_that_there_are() -> None:
    def asked(rule: dict[str, Any]) -> set[str]:
        texts = [rule["expr"]]
        for annotation in rule.get("annotations", {}).values():
            texts += queries_within(annotation)
        return set().union(*map(metrics_of, texts))

    every = [*ALERTS.values(), *rules("record").values()]
    queries = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", PAGE, re.MULTILINE)
    found = set().union(*map(asked, every), *map(metrics_of, queries))
    assert found <= exported()
    assert rules("record").keys() <= found, "recorded for nobody"


def test_every_rule_keeps_two_clusters_of_one_prometheus_apart() -> None:
    """Their Nodes may have the same names: alerts/clusters.yaml."""
    expressions = [rule["expr"] for rule in (*ALERTS.values(), *rules("record").values())]
    expressions += [target["expr"] for each in DASHBOARDS.values() for target in _targets(each)]
    for expression in expressions:
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert "cluster" in labels.split(", "), expression


def _targets(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in panels(dashboard) for target in panel["targets"]]
