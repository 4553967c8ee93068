"""docs/monitoring.md has a row and a section for every alert, and for no other.

That each section begins with the alert's severity and says what to do:
tests/monitoring/test_alerts.py.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from .pages import ROOT, page

PAGE = page("docs/monitoring.md")
RULES = yaml.safe_load((ROOT / "k8s/components/alerts/prometheusrule.yaml").read_text())
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in RULES["spec"]["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


def test_each_alert_has_its_section_and_no_other() -> None:
    sections = [text for level, text in PAGE.headings if level == 3 and text.startswith("Npu")]
    assert sorted(sections) == sorted(ALERTS)


def test_each_alert_has_its_row_with_its_severity() -> None:
    rows = re.findall(r"^\| \[(Npu\w+)\]\(#(\w+)\) \| (\w+) \|", PAGE.text, re.MULTILINE)
    assert sorted((name, severity) for name, _, severity in rows) == sorted(
        (name, rule["labels"]["severity"]) for name, rule in ALERTS.items()
    )
    assert all(anchor == name.lower() for name, anchor, _ in rows)


def test_alerts_that_are_spoken_of_anywhere_exist() -> None:
    spoken = {
        name
        for path in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"\bNpu[A-Z]\w+", path.read_text())
    }
    assert spoken <= set(ALERTS)
