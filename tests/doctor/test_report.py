"""What the lines look like, for people and for programs."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from npu_agent.doctor import report
from npu_agent.doctor.check import Check, Verdict
from npu_agent.doctor.examine import examine
from tests.doctor.helpers import Node
from tests.outputs.deviceplugin.helpers import golden

GOLDEN = Path(__file__).parent / "golden"
LONG = Check(
    "resource " + "x" * 60,
    Verdict.WRONG,
    "detail " * 40 + "D" * 120,
    "remedy " * 40 + "[bold]R[/]",
)


def drawn(checks: tuple[Check, ...], width: int, *, narrow: bool = True) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, markup=False, emoji=False).print(
        report.table(checks, narrow=narrow)
    )
    return out.getvalue()


async def test_the_table_of_a_good_node(node: Node) -> None:
    """Without what is another one each time: the temporary directory, the ports, the owner."""
    base = str(node.root.parent)
    checks = tuple(
        replace(
            check,
            detail=re.sub(
                r"uid \d+, gid \d+, mode 0\d+|(?<=127.0.0.1:)\d+|\d+(?= bytes of)",
                lambda found: "..." if found[0].isdigit() else "uid 0, gid 0, mode 0755",
                check.detail.replace(base, "/base"),
            ),
        )
        for check in await examine(node.situation)
    )
    found = drawn(checks, 80)
    assert found == golden(GOLDEN / "good.txt", found)
    assert report.summary(checks) == "29 ok"


def test_nothing_is_cut_and_nothing_is_wider_than_the_terminal() -> None:
    for width in (40, 80, 400):
        found = drawn((LONG,), width)
        assert max(map(len, found.splitlines())) <= width
        text = "".join(
            "".join(cell.strip() for cell in line.split("|")[3:4]) for line in found.splitlines()
        )
        assert text.count("D") == 120
        assert text.count("remedy") == 40 or width < 80
        assert "[bold]R[/]" in text
        assert found.count("x") == 60
        assert "…" not in found


def test_in_a_pipe_a_name_is_on_one_line() -> None:
    assert LONG.name in drawn((LONG,), 400, narrow=False)


def test_json_has_every_field() -> None:
    assert json.loads(report.as_json((LONG,))) == [
        {"name": LONG.name, "state": "wrong", "detail": LONG.detail, "remedy": LONG.remedy}
    ]
