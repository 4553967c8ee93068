"""The chart's README is made of values.yaml, and of all of it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))
chart: Any = import_module("chart")
VALUES = ROOT / "k8s/chart/values.yaml"


def test_the_readme_is_current() -> None:
    assert chart.FILE.read_text(encoding="utf-8") == chart.current(), "run `make docs`"


def test_an_undescribed_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = VALUES.read_text(encoding="utf-8").replace("## The Pod\n", "## The Pod\n\nsilent: {}\n")
    (tmp_path / "values.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(chart, "CHART", tmp_path)
    line = text.splitlines().index("silent: {}") + 1
    with pytest.raises(ValueError, match=f"values.yaml:{line}: say in a comment what silent is"):
        chart.current()
