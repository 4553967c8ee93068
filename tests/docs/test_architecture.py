"""docs/dev/architecture.md has every package and module of npu_agent, and its deadlines add up."""

from __future__ import annotations

import math
import re
from importlib import import_module
from typing import Any

import pytest
import yaml

from .pages import ROOT, page

PAGE = page("docs/dev/architecture.md")
PACKAGE = ROOT / "npu_agent"


def test_every_package_is_there() -> None:
    [table] = re.findall(r"\| package \| what.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.text)
    named = {
        name for row in table.splitlines() for name in re.findall(r"`([\w/.]+)`", row.split("|")[1])
    }
    there = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in PACKAGE.glob("[!_]*.py")}
    assert named == there


[_DEADLINES] = re.findall(r"\| what \| deadlines .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.text)


@pytest.mark.parametrize("row", _DEADLINES.splitlines())
def test_deadlines_add_up(row: str) -> None:
    _, _, deadlines, total, limit, _ = map(str.strip, row.split("|"))
    assert math.isclose(sum(map(seconds, deadlines.split(" + "))), float(total))
    for above in filter(None, limit.split(", else ")):
        assert float(total) < seconds(above)


def test_the_daemon_set_has_the_grace_period_of_the_table() -> None:
    (daemon_set,) = yaml.safe_load_all((ROOT / "k8s/daemonset.yaml").read_text(encoding="utf-8"))
    seconds = daemon_set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert f"| {seconds}, `terminationGracePeriodSeconds` |" in _DEADLINES


def seconds(cell: str) -> float:
    """Of a number, or of a constant or a default: `` `kube.client:ApiTiming.deadline` ``."""
    if number := re.match(r"[0-9.]+", cell):
        return float(number[0])
    module, _, path = cell.strip("`").partition(":")
    value: Any = import_module(f"npu_agent.{module}")
    for name in path.split("."):
        value = getattr(value() if isinstance(value, type) else value, name)
    return float(value)
