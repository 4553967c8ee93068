"""`make lint` refuses a room that outgrows its budget of lines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.budgets import lines_by_room, violations


def test_a_room_above_its_budget_is_named() -> None:
    assert violations(Counter({"core": 11, "kube": 10}), {"core": 10, "kube": 10}) == [
        "npu_agent/core: 11 lines, and budgets.toml allows 10"
    ]


def test_a_room_without_a_budget_and_a_budget_without_a_room_are_named() -> None:
    assert violations(Counter({"new": 3}), {"old": 10}) == [
        "npu_agent/new: add its budget to budgets.toml (3 lines)",
        "npu_agent/old: remove its budget from budgets.toml",
    ]


def test_generated_code_does_not_count(tmp_path: Path) -> None:
    for name in ("cli.py", "kubelet/rpc.py", "kubelet/wire/v1/messages.py", "outputs/dra/pool.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\ntwo\n")
    assert lines_by_room(tmp_path) == {".": 2, "kubelet": 2, "outputs/dra": 2}
