"""The doctor's lines for people, as a table, and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from npu_agent.doctor.check import Check, Verdict

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {Verdict.WRONG: "red", Verdict.NOTE: "yellow", Verdict.UNKNOWN: "yellow"}

_NAME = 22
"""Columns for names in a terminal; nearly all are shorter."""


def table(checks: Iterable[Check], *, narrow: bool) -> Table:
    """One row for each check; what to do about it is a line of its own in its last cell.

    Nothing is ever cut: words that are longer than the terminal is wide are folded. With `narrow`
    long names are folded too, so that 80 columns have room for what was found.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.ASCII2, header_style="")
    made.add_column("State", no_wrap=True)
    made.add_column("Check", overflow="fold", max_width=_NAME if narrow else None)
    made.add_column("Found, and what to do", overflow="fold")
    for check in checks:
        found = f"{check.detail}\n-> {check.remedy}" if check.remedy else check.detail
        made.add_row(check.state.value, check.name, found, style=_STYLES.get(check.state))
    return made


def summary(checks: Iterable[Check]) -> str:
    """The last line: whether anything is wrong."""
    states = [check.state for check in checks]
    counts = {state: states.count(state) for state in Verdict if state is not Verdict.UNUSED}
    return ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)


def failed(checks: Iterable[Check]) -> bool:
    """Whether anything is wrong, for the exit code."""
    return any(check.state is Verdict.WRONG for check in checks)


def as_json(checks: Iterable[Check]) -> str:
    """A list of objects with the fields of `Check`.

    In ASCII: what it quotes from an environment may be no text.
    """
    return json.dumps([check.as_json() for check in checks], indent=2)
