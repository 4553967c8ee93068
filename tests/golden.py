"""Golden files, which hold what something should look like as a whole, and how a failure reads."""

from __future__ import annotations

import os
from pathlib import Path

USED: list[Path] = []
"""The files of the running test: `tests/conftest.py` says in a failure how to renew them."""
LONGEST_LINE = 240
LONGEST = 16_000
"""Characters of a failure. Hypothesis prints each drawn value, and a value may hold all cards."""


def golden(path: Path, found: str) -> str:
    """The text of a golden file; UPDATE_GOLDEN=1 writes it again after a wanted change."""
    USED.append(path)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(found, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def remedy(test: str) -> str:
    """How the golden files of a test, by its ID, are renewed."""
    module = test.partition("::")[0]
    return (
        "If the change is wanted, renew the golden files, and read the difference:\n"
        f'  UPDATE_GOLDEN=1 make test ARGS="-n0 {module}"; git diff {Path(module).parent}'
    )


def shortened(text: str) -> str:
    """A failure that is quick to read: with its long lines cut, and without its middle."""
    text = "\n".join(
        line
        if len(line) <= LONGEST_LINE
        else f"{line[:LONGEST_LINE]}... ({len(line):,} characters)"
        for line in text.split("\n")
    )
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    left_out = f"... {len(text) - LONGEST:,} characters are left out: -vv shows them ..."
    return f"{text[:half]}\n{left_out}\n{text[-half:]}"
