"""What the lines look like, for people and for programs."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from npu_agent.people.doctor import report
from npu_agent.people.doctor.check import Check, State
from npu_agent.people.doctor.examine import examine
from tests.golden import golden
from tests.people.doctor.helpers import Node

GOLDEN = Path(__file__).parent / "golden"
LONG = Check(
    "resource " + "x" * 60,
    State.WRONG,
    "detail " * 40 + "D" * 120,
    "remedy " * 40 + "[bold]R[/]",
    "see --this",
    section="Kubelet",
)


def drawn(
    checks: tuple[Check, ...], width: int, *, narrow: bool = True, everything: bool = False
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False)
    for part in report.parts(checks, everything=everything, columns=width if narrow else None):
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


async def examined(node: Node) -> tuple[Check, ...]:
    """Without what is another one each time: the temporary directory, the ports, the owner."""
    base = str(node.root.parent)
    return tuple(
        replace(
            check,
            detail=re.sub(
                r"(?<=127.0.0.1:)\d+",
                "...",
                check.detail.replace(base, "/base"),
            ),
        )
        for check in await examine(node.context)
    )


async def test_the_report_of_a_good_node(node: Node) -> None:
    checks = await examined(node)
    found = drawn(checks, 80, everything=True)
    assert found == golden(GOLDEN / "good.txt", found)
    # Without anything to fix it begins with the first subject.
    assert drawn(checks, 80).startswith("Running agent\nok ")
    assert drawn(checks, 80).endswith(
        "16 ok\nNot shown: lines that do not apply here (2); --all shows them\n"
    )


async def test_the_report_of_a_node_with_several_faults(node: Node) -> None:
    """First what to fix, in its order: what the agent reports, then the rest."""
    await node.kubelet.stop()
    (node.directory / "kubelet.sock").unlink(missing_ok=True)
    node.api.rights.discard(("patch", "nodes"))
    text = "npu1 is unhealthy: the driver reports the card dead"
    node.reports(problems=[{"subject": "card", "text": text, "remedy": "reset it"}])
    checks = await examined(node)
    found = drawn(checks, 80)
    assert found == golden(GOLDEN / "faults.txt", found)


def test_what_is_wrong_with_many_cards_is_one_thing_to_fix() -> None:
    dead = Check("", State.WRONG, "it is dead", "reset it", "dmesg", section="Hardware")
    cards = tuple(replace(dead, name=f"card npu{index}") for index in range(64))
    other = replace(dead, name="kubelet.sock")
    found = drawn((*cards, other), 100)
    assert found.startswith("2 things to fix, in this order:\n")
    assert "1.  card npu0, npu1, npu2, npu3 and 60 more: it is dead\n" in found
    assert found.count("-> reset it") == 2
    assert found.count("it is dead (see 1.)") == 64


def test_nothing_is_cut_and_nothing_is_wider_than_the_terminal() -> None:
    for width in (40, 80, 400):
        found = drawn((LONG,), width)
        assert max(map(len, found.splitlines())) <= width
        first, _, section = found.partition("Kubelet\n")
        for part in (first, section):
            assert part.count("D") == 120
            assert part.replace("fix", "").count("x") == 60
        assert first.count("remedy") == 40
        assert "[bold]R[/]" in first
        assert "…" not in found


def test_in_a_pipe_a_name_is_on_one_line() -> None:
    assert LONG.name in drawn((LONG,), 400, narrow=False)
