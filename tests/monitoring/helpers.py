"""The monitoring files of k8s/ as the tests read them, and what the agent's code exports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_agent.outputs.prometheus import own
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from tests.outputs.prometheus.helpers import own as new_agent

PROJECT = Path(__file__).parents[2]
COMPONENTS = PROJECT / "k8s" / "components"
PAGE = (PROJECT / "docs" / "monitoring.md").read_text(encoding="utf-8")
RUNBOOK = (PROJECT / "docs" / "alerts.md").read_text(encoding="utf-8")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None and not os.environ.get("CI"),
    reason="promtool and prometheus are not installed: apt-get install prometheus",
)
"""For tests that run Prometheus' own programs. CI installs them, and skips none: it fails."""

_OF_PROMETHEUS = {"up", "scrape_duration_seconds", "ALERTS"}
"""Series that Prometheus makes itself."""
_WORDS = {"and", "or", "unless", "bool", "offset"}


def manifest(path: str) -> dict[str, Any]:
    """A file of k8s/ that holds one object."""
    found: dict[str, Any] = yaml.safe_load((PROJECT / "k8s" / path).read_text(encoding="utf-8"))
    return found


def groups(interval: str | None = None) -> list[dict[str, Any]]:
    """The rule groups, as a rules file has them; `interval` replaces theirs."""
    rule = manifest("components/alerts/prometheusrule.yaml")
    found: list[dict[str, Any]] = rule["spec"]["groups"]
    return [{**group, "interval": interval} for group in found] if interval else found


def promtool(*arguments: str | Path, cwd: Path) -> None:
    """Runs promtool, which has to be content."""
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def write_rules(directory: Path, interval: str | None = None) -> Path:
    """Writes the rules as Prometheus and promtool read them, without Kubernetes around them."""
    path = directory / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": groups(interval)}, sort_keys=False), encoding="utf-8")
    return path


def judge(
    directory: Path,
    series: Mapping[str, str],
    expected: Mapping[str, Mapping[str, float]],
    *,
    at: str = "5m",
    scraped: str = "1m",
    evaluated: str = "",
) -> None:
    """promtool finds what is expected: by expression the values by labels.

    Args:
        directory: for its files.
        series: values by name, as promtool writes them.
        expected: what each expression finds.
        at: when it is asked.
        scraped: how often the series have a value.
        evaluated: how often our rules are evaluated; empty: never.
    """
    asked = [
        {
            "expr": expression,
            "eval_time": at,
            "exp_samples": [
                {"labels": f"{{{labels}}}", "value": value} for labels, value in rows.items()
            ],
        }
        for expression, rows in expected.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": scraped, "input_series": given, "promql_expr_test": asked}
    whole: dict[str, Any] = {"evaluation_interval": evaluated or "1m", "tests": [test]}
    if evaluated:
        whole["rule_files"] = [write_rules(directory).name]
    (directory / "test.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    promtool("test", "rules", "test.yaml", cwd=directory)


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """The rules of a kind, ``alert`` or ``record``, by name."""
    return {rule[kind]: rule for group in groups() for rule in group["rules"] if kind in rule}


DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in (COMPONENTS / "dashboard").glob("*.json")
}
"""By the name of the file, which is the ``uid``."""


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Its panels that show something: all but the rows, also what is in a folded row."""
    every = [inner for panel in dashboard["panels"] for inner in (panel, *panel.get("panels", ()))]
    return [panel for panel in every if panel["type"] != "row"]


def exported() -> set[str]:
    """The names of all series that there can be: of the agent's code, and what comes of them."""
    names = set(_OF_PROMETHEUS) | rules("record").keys()
    histograms: set[str] = set()
    for family in own.families(new_agent()):
        (histograms if family.kind == "histogram" else names).add(family.name)
    names |= {family.name for family in own.of_process()}
    for schema in SCHEMAS.values():
        names |= {metric.name for metric in schema.metrics}
    names |= {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}
    return names


def metrics_of(expression: str) -> set[str]:
    """The names of the series that a PromQL expression asks for."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    found = re.finditer(r"(?<![\w.:])([a-zA-Z_:][\w:]*)(\s*\()?", text)
    return {each[1] for each in found if not each[2] and each[1] not in _WORDS}


def queries_within(template: str) -> Iterator[str]:
    """The PromQL of the queries in an annotation, with something in each place that is filled."""
    for text in re.findall(r'query \(printf "((?:[^"\\]|\\.)*)"', template):
        yield text.replace(r"\"", '"').replace("%q", '"x"')
