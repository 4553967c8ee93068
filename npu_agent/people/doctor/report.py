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


def to_fix(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Returns the wrong lines that do not follow from others, in the order to fix them."""
    return tuple(one for one in checks if one.state is State.WRONG and not one.follows)


def parts(checks: Sequence[Check], *, everything: bool, columns: int | None) -> Iterator[object]:
    """The report: tables of rich, and lines. Nothing is cut: long words are folded.

    `everything` has lines too that follow from others, or do not apply. `columns` of the terminal;
    None: as many as it takes.
    """
    if first := _alike(to_fix(checks)):
        yield f"{len(first)} thing{'s' * (len(first) > 1)} to fix, in this order:"
        yield ""
        yield _fixes(first)
    numbers = {one: at for at, alike in enumerate(first, 1) for one in alike}
    shown = [one for one in checks if everything or not _folded(one)]
    longest = max((len(one.name) for one in shown), default=0)
    width = longest if columns is None else min(longest, _NAME, columns // 3)
    for section in dict.fromkeys(one.section for one in shown):
        yield section
        yield _section([one for one in shown if one.section == section], numbers, width)
    yield summary(checks)
    if len(shown) < len(checks):
        yield _left_out(checks)


def _alike(checks: Iterable[Check]) -> list[list[Check]]:
    """Groups lines that are wrong in the same way for many cards."""
    found: dict[tuple[str, str], list[Check]] = {}
    for one in checks:
        found.setdefault((one.name.partition(" ")[0], one.detail), []).append(one)
    return [*found.values()]


def _folded(check: Check) -> bool:
    return check.state is State.UNUSED or bool(check.follows)


def _left_out(checks: Sequence[Check]) -> str:
    follow = sum(bool(one.follows) for one in checks)
    unused = sum(one.state is State.UNUSED for one in checks)
    words = [f"lines that follow from others ({follow})"] * bool(follow)
    words += [f"lines that do not apply here ({unused})"] * bool(unused)
    return f"Not shown: {', '.join(words)}; --all shows them"


def _fixes(found: Sequence[Sequence[Check]]) -> Table:
    table = _table(2)
    for at, (check, *others) in enumerate(found, 1):
        also = [one.name.partition(" ")[2] for one in others]
        table.add_row(f"{at}.", f"{listed((check.name, *also), 4)}: {check.detail}", style="red")
        table.add_row("", f"-> {check.remedy}")
        if check.command:
            table.add_row("", f"$ {check.command}")
        table.add_row("", "")
    return table


def _section(checks: Sequence[Check], numbers: Mapping[Check, int], width: int) -> Table:
    table = _table(len(State.UNKNOWN.value), width)
    for check in checks:
        found = check.detail
        if check in numbers:
            found += f" (see {numbers[check]}.)"
        else:
            found += f" (follows from: {check.follows})" if check.follows else ""
            found += f"\n-> {check.remedy}" if check.remedy else ""
        table.add_row(check.state.value, check.name, found, style=_STYLES.get(check.state))
    table.add_row("", "", "")
    return table


def _table(*widths: int) -> Table:
    from rich.table import Table

    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for width in widths:
        made.add_column(width=width, overflow="fold")
    made.add_column(overflow="fold")
    return made


def lines(checks: Iterable[Check]) -> str:
    return "\n".join(
        f"{one.state.value:5}  {one.name}: {one.detail}" + (f"; {one.remedy}" if one.remedy else "")
        for one in checks
    )


def summary(checks: Iterable[Check]) -> str:
    states = [check.state for check in checks]
    counts = {state: states.count(state) for state in State if state is not State.UNUSED}
    return ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)


def failed(checks: Iterable[Check]) -> bool:
    return any(check.state is State.WRONG for check in checks)
