"""docs/dev/architecture.md has every package and module of npu_agent, and no other."""

from __future__ import annotations

import re

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
