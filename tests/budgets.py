"""Checks that no room of npu_agent outgrows its budget of lines: a part of ``make lint``.

The budgets are in ``budgets.toml``. A change that makes a room smaller lowers its budget; one that
has to raise a budget says why in its commit.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lines_by_room(package: Path) -> Counter[str]:
    """The lines of Python in each folder of the package; "." has its own modules."""
    found: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        room = file.relative_to(package).parent
        if "wire" not in room.parts:  # generated
            found[str(Path(*room.parts[:2]))] += len(file.read_text().splitlines())
    return found


def violations(lines: Counter[str], budgets: dict[str, int]) -> list[str]:
    """What is wrong, a line each; none: every room is within its budget."""
    over = [
        f"npu_agent/{room}: {lines[room]} lines, and budgets.toml allows {budgets[room]}"
        for room in sorted(lines.keys() & budgets.keys())
        if lines[room] > budgets[room]
    ]
    unknown = [
        f"npu_agent/{room}: add its budget to budgets.toml ({lines[room]} lines)"
        for room in sorted(lines.keys() - budgets.keys())
    ]
    gone = [
        f"npu_agent/{room}: remove its budget from budgets.toml"
        for room in sorted(budgets.keys() - lines.keys())
    ]
    return over + unknown + gone


def main() -> int:
    """Prints each violation; returns 1 if there is one."""
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text())["rooms"]
    found = violations(lines_by_room(ROOT / "npu_agent"), budgets)
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
