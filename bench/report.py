"""The pages that show the figures: docs/benchmarks.md all of them, the READMEs a few.

`make bench` writes them, so that all are of one run.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.figure import HEADER, Figure
from npu_agent import __version__
from npu_agent.people.commands.version import commit_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
READMES = tuple(ROOT / name for name in ("README.md", "README.ko.md", "README.ja.md"))
BEGIN, END = "<!-- by `make bench`: begin -->\n", "<!-- end -->\n"
PEERS_BEGIN = "<!-- by `make bench ARGS=--peers`: begin -->\n"
PEERS = "peers, "
"""Before the names of peers' figures in the READMEs."""
DATE = "date"
"""The name of the day of the run in the READMEs."""


def conditions() -> str:
    """The day, the versions and the machine of a run that begins now."""
    commit = commit_of(ROOT / "npu_agent") or "unknown"
    model = re.search(
        r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
    )
    return (
        f"{datetime.now(UTC).date()}: npu-agent {__version__}, commit {commit},\n"
        f"Python {platform.python_version()}, Linux {platform.release()}, "
        f"{os.cpu_count()} cores of {model[1] if model else platform.machine()}, "
        f"load at the start {os.getloadavg()[0]:.1f}."
    )


def table(figures: Sequence[Figure]) -> str:
    """The figures and their targets."""
    return "\n".join((HEADER, *map(str, figures)))


def compared(figures: Sequence[Figure], columns: Sequence[str]) -> str:
    """A row for each figure, whose name begins with that of its column."""
    rows: dict[str, dict[str, str]] = {}
    for one in figures:
        column, _, what = one.what.partition(": ")
        rows.setdefault(what, {})[column] = one.measured
    lines = [("figure", *columns), ("---",) * (len(columns) + 1)]
    lines += [(what, *(cells.get(name, "") for name in columns)) for what, cells in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  ", "| ") for line in lines)


def page(text: str, run: str, made: str, begin: str = BEGIN) -> str:
    """The page with the table of this run between its marks.

    Raises:
        ValueError: the page has no marks.
    """
    before, found, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"the page has lost its marks {begin.strip()} and {END.strip()}")
    return f"{before}{begin}\n{run}\n\n{made}\n\n{end}{after}"


def readme(text: str, run: str, figures: Sequence[Figure], prefix: str = "") -> str:
    """The README with the values of this run, each after a comment that names its figure.

    `prefix` is that of the names of all peers' figures; without it, these stay as they are.

    Raises:
        KeyError: the run has no figure of that name.
    """
    values = {DATE: run.partition(":")[0], **{one.what: one.measured for one in figures}}
    mark = re.compile(rf"<!-- {prefix or f'(?!{PEERS})'}(.+?) -->.*? \|")
    return mark.sub(lambda found: f"<!-- {prefix}{found[1]} -->{values[found[1]]} |", text)


def write(run: str, figures: Sequence[Figure], columns: Sequence[str] = ()) -> None:
    """Writes all pages, or none where one of them does not fit the run; `columns` are of peers."""
    begin, prefix = (PEERS_BEGIN, PEERS) if columns else (BEGIN, "")
    of_run = compared(figures, columns) if columns else table(figures)
    made = {PAGE: page(PAGE.read_text(encoding="utf-8"), run, of_run, begin)}
    made |= {
        path: readme(path.read_text(encoding="utf-8"), run, figures, prefix) for path in READMES
    }
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
