"""The inhibitions of docs/monitoring.md: Alertmanager takes them, and they concern one card."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.helpers import PAGE, rules

[TEXT] = re.findall(r"```yaml\n(inhibit_rules:.+?)```", PAGE, re.DOTALL)
CARD = ["cluster", "hostname", "arch", "device"]


@pytest.mark.skipif(
    shutil.which("amtool") is None and not os.environ.get("CI"),
    reason="amtool is not installed: apt-get install prometheus-alertmanager",
)
def test_alertmanager_takes_them(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"route: {{receiver: none}}\nreceivers: [{{name: none}}]\n{TEXT}", encoding="utf-8"
    )
    done = subprocess.run(["amtool", "check-config", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", yaml.safe_load(TEXT)["inhibit_rules"], ids=str)
def test_the_worse_alert_silences_the_milder_ones_of_the_same_card(rule: dict[str, Any]) -> None:
    """Both have to have the labels, or the rule inhibits nothing."""
    assert rule["equal"] == CARD
    for matchers in (rule["source_matchers"], rule["target_matchers"]):
        (alerts,) = (re.fullmatch(r'alertname =~? "?([\w|]+)"?', matcher) for matcher in matchers)
        assert alerts
        for alert in alerts[1].split("|"):
            assert f"({', '.join(CARD)}" in rules("alert")[alert]["expr"]
