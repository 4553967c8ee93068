"""docs/dev/reliability.md has a row for each module of tests/chaos/attacks, with its tests."""

from __future__ import annotations

import re

from .pages import ROOT, page

PAGE = page("docs/dev/reliability.md")


def test_every_class_of_faults_has_a_row() -> None:
    rows = set(re.findall(r"^\| .* \| \[`(\w+)\.py`\]", PAGE.text, re.MULTILINE))
    assert rows == {path.stem for path in (ROOT / "tests/chaos/attacks").glob("[!_]*.py")}
