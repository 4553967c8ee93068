"""The lines of `doctor` and `verify` for people: first what to fix, then each subject."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from npu_agent.people.doctor.check import Check, State
from npu_agent.text import listed

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {State.WRONG: "red", State.NOTE: "yellow", State.UNKNOWN: "yellow"}

_NAME = 22


def parts(checks: Sequence[Check], *, everything: bool, columns: int | None) -> Iterator[object]:
    """The report: tables of rich, and lines. Nothing is cut: long words are folded.

    `everything` has lines too that do not apply. `columns` of the terminal; None: as many as it
    takes.
    """
    if first := _alike(check for check in checks if check.state is State.WRONG):
        yield f"{len(first)} thing{'s' * (len(first) > 1)} to fix, in this order:"
        yield ""
        yield _fixes(first)
    numbers = {check: at for at, alike in enumerate(first, 1) for check in alike}
    shown = [check for check in checks if everything or check.state is not State.UNUSED]
    longest = max((len(check.name) for check in shown), default=0)
    width = longest if columns is None else min(longest, _NAME, columns // 3)
    for section in dict.fromkeys(check.section for check in shown):
        yield section
        yield _section([check for check in shown if check.section == section], numbers, width)
    yield _summary(checks)
    if unused := len(checks) - len(shown):
        yield f"Not shown: lines that do not apply here ({unused}); --all shows them"


def _alike(checks: Iterable[Check]) -> list[list[Check]]:
    """Groups lines that are wrong in the same way for many cards."""
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.name.partition(" ")[0], check.detail), []).append(check)
    return [*groups.values()]


def _fixes(groups: Sequence[Sequence[Check]]) -> Table:
    table = _table(2)
    for at, (check, *others) in enumerate(groups, 1):
        also = [other.name.partition(" ")[2] for other in others]
        table.add_row(f"{at}.", f"{listed((check.name, *also), 4)}: {check.detail}", style="red")
        table.add_row("", f"-> {check.remedy}")
        if check.command:
            table.add_row("", f"$ {check.command}")
        table.add_row("", "")
    return table


def _section(checks: Sequence[Check], numbers: Mapping[Check, int], width: int) -> Table:
    table = _table(len(State.UNKNOWN.value), width)
    for check in checks:
        text = check.detail
        if check in numbers:
            text += f" (see {numbers[check]}.)"
        elif check.remedy:
            text += f"\n-> {check.remedy}"
        table.add_row(check.state.value, check.name, text, style=_STYLES.get(check.state))
    table.add_row("", "", "")
    return table


def _table(*widths: int) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for width in widths:
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    return table


def lines(checks: Iterable[Check]) -> str:
    return "\n".join(
        f"{check.state.value:5}  {check.name}: {check.detail}"
        + (f"; {check.remedy}" if check.remedy else "")
        for check in checks
    )


def _summary(checks: Iterable[Check]) -> str:
    states = [check.state for check in checks]
    counts = {state: states.count(state) for state in State if state is not State.UNUSED}
    return ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)


def failed(checks: Iterable[Check]) -> bool:
    return any(check.state is State.WRONG for check in checks)
