"""Checks that npu_agent and its rooms do not outgrow their lines: a part of ``make lint``.

The budgets are in ``budgets.toml``: a number for each room, and one for the house, so that what is
saved in one room is not spent in the next. A change that makes a room smaller lowers its budget;
one that has to raise a budget says why in its commit. tests/bench/test_weight.py has the number
for what the running agent loads.
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


def violations(lines: Counter[str], budgets: dict[str, int], house: int) -> list[str]:
    """What is wrong, a line each; none: every room and the house are within their budgets."""
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
    total = sum(lines.values())
    all_of_it = [f"npu_agent: {total} lines, and budgets.toml allows {house}"]
    return over + unknown + gone + (all_of_it if total > house else [])


def main() -> int:
    """Prints each violation; returns 1 if there is one."""
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text())
    found = violations(lines_by_room(ROOT / "npu_agent"), budgets["rooms"], budgets["house"])
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
