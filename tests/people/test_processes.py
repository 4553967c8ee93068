"""Which processes have a card open, by a /proc that is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_agent.core.hardware import Snapshot
from npu_agent.people.commands import view
from npu_agent.people.processes import Process, users
from tests.outputs.deviceplugin.helpers import state

CARDS = (state("warboy", 0, id_="A"), state("warboy", 1, id_="B"))


def process(root: Path, pid: int, command: str, *files: str) -> Path:
    directory = root / "proc" / str(pid)
    (directory / "fd").mkdir(parents=True)
    (directory / "comm").write_text(f"{command}\n", encoding="utf-8")
    for number, name in enumerate(files):
        (directory / "fd" / str(number)).symlink_to(name)
    return directory


def test_a_process_is_named_once_for_each_card_that_it_has_open(tmp_path: Path) -> None:
    process(tmp_path, 20, "python3", "/dev/npu0pe0", "/dev/npu0ch0", "/dev/npu1pe0-1", "/dev/null")
    process(tmp_path, 3, "llm", "/dev/npu1pe1", "socket:[1]")
    process(tmp_path, 4, "sh", "/dev/npu10pe0", "/dev/null")
    (tmp_path / "proc/self").symlink_to("20")
    (tmp_path / "proc/5").mkdir()  # it has ended
    found = users(tmp_path, CARDS)
    python = Process(20, "python3")
    assert found.by_card == {"A": [python], "B": [Process(3, "llm"), python]}
    assert not found.hidden
    cards = view.cards_as_json(Snapshot(CARDS), users=found)
    assert cards[0]["processes"] == [{"pid": 20, "command": "python3"}]
    assert view.totals(cards) == "2 cards, 0 unhealthy, 2 in use"
    assert "3 llm, 20 python3" in view.drawn(view.cards_table(Snapshot(CARDS), users=found))


def test_files_that_only_root_sees_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(tmp_path, 7, "other", "/dev/npu0pe0")

    def refuse(_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", refuse)
    found = users(tmp_path, CARDS)
    assert (dict(found.by_card), found.hidden) == ({}, True)
