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
DATE = "date"
"""The name of the day of the run in the READMEs."""


def conditions() -> str:
    """The day, the versions and the machine of a run that begins now."""
    commit = commit_of(ROOT / "npu_agent") or "unknown"
    model = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return (
        f"{datetime.now(UTC).date()}: npu-agent {__version__}, commit {commit},\n"
        f"Python {platform.python_version()}, Linux {platform.release()}, "
        f"{os.cpu_count()} cores of {model[1] if model else platform.machine()}, "
        f"load at the start {os.getloadavg()[0]:.1f}."
    )


def page(text: str, run: str, figures: Sequence[Figure]) -> str:
    """The page with this run between its marks.

    Raises:
        ValueError: the page has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has lost its marks {BEGIN.strip()} and {END.strip()}")
    table = "\n".join((HEADER, *map(str, figures)))
    return f"{before}{begin}\n{run}\n\n{table}\n\n{end}{after}"


def readme(text: str, run: str, figures: Sequence[Figure]) -> str:
    """The README with the values of this run, each after a comment that names its figure.

    Raises:
        KeyError: the run has no figure of that name.
    """
    values = {DATE: run.partition(":")[0], **{one.what: one.measured for one in figures}}
    return re.sub(
        r"<!-- (.+?) -->.*? \|", lambda mark: f"<!-- {mark[1]} -->{values[mark[1]]} |", text
    )


def write(run: str, figures: Sequence[Figure]) -> None:
    """Writes all pages, or none where one of them does not fit the run."""
    made = {PAGE: page(PAGE.read_text(), run, figures)}
    made |= {path: readme(path.read_text(), run, figures) for path in READMES}
    for path, text in made.items():
        path.write_text(text)
