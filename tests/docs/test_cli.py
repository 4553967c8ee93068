"""docs/cli.md has the agent's errors, Events and keys as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from npu_agent.cli.main import main
from npu_agent.core.timeline import ENTRIES

from .pages import ROOT, page

PAGE = page("docs/cli.md")


def test_the_errors_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has these mistakes in its lines 2 and 5."""
    file = tmp_path / "config.yaml"
    file.write_text("interval: 10\ndefautPe: Single\n\nhealth:\n  failures: 0\n", encoding="utf-8")
    [(_, shown)] = PAGE.below("The command line and the status page")
    command, _, errors = shown.partition("\n")
    assert command == "$ npu-agent config check config.yaml"
    assert main(["config", "check", str(file)]) == 2
    assert capsys.readouterr().err.replace(str(file), file.name) == errors


def test_the_list_of_events_has_each_reason() -> None:
    [section] = re.findall(r"### Events of the Node\n(.*?)\n###", PAGE.text, re.DOTALL)
    reasons = {kind for kind, traits in ENTRIES.items() if traits.is_event}
    assert set(re.findall(r"`((?:NPU|Config|DRA|Pod)[A-Z]\w+)`", section)) == reasons


def test_each_key_of_the_table_is_in_the_document_that_the_page_shows() -> None:
    found = json.loads((ROOT / "tests/outputs/web/golden/status.json").read_text(encoding="utf-8"))
    table = PAGE.text.partition("### For programs\n")[2].partition("\n|---")[2]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert named
    assert named <= set(keys(found))


def keys(found: object) -> Iterator[str]:
    """Those of the document and of all that is in it, but for names of labels and of errors."""
    if isinstance(found, list):
        for one in found:
            yield from keys(one)
    elif isinstance(found, dict):
        for key, value in found.items():
            yield key
            named = key == "errors" or (key == "labels" and "output" in found)
            yield from () if named else keys(value)
