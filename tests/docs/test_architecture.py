"""docs/architecture.md knows every room of the package, and none that is not there."""

from __future__ import annotations

import re

from .pages import ROOT, page

PAGE = page("docs/architecture.md")
PACKAGE = ROOT / "npu_agent"


def test_every_room_is_there() -> None:
    [table] = re.findall(r"\| room \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.text)
    named = {
        name for row in table.splitlines() for name in re.findall(r"`([\w/.]+)`", row.split("|")[1])
    }
    there = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in PACKAGE.glob("[!_]*.py")}
    assert named == there
