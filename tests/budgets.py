"""Checks that npu_agent does not outgrow its statements, and its names: a part of ``make lint``.

Statements are counted, never lines: no budget should make code denser. A statement is a node
``ast.stmt`` of the syntax tree; docstrings do not count.

The budgets are in ``budgets.toml``: a number for each room, and one for the house, so that what is
saved in one room is not spent in the next. A change that makes a room smaller lowers its budget;
one that has to raise a budget says why in its commit. tests/bench/test_weight.py has the number
for what the running agent loads.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 66
"""Statements of a function, with its own line."""
VAGUE = {"one": 40, "found": 40}
"""Names that fit anything, and how often the package may still have them."""


def statements(tree: ast.AST) -> int:
    """The statements of a syntax tree, without its docstrings."""
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(tree))


def _is_docstring(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def statements_by_room(package: Path) -> Counter[str]:
    """The statements in each folder of the package; "." has its own modules."""
    rooms: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        room = file.relative_to(package).parent
        if "wire" not in room.parts:  # generated
            rooms[str(Path(*room.parts[:2]))] += statements(ast.parse(file.read_text("utf-8")))
    return rooms


def violations(rooms: Counter[str], budgets: dict[str, int], house: int) -> list[str]:
    """What is wrong, a line each; none: every room and the house are within their budgets."""
    over = [
        f"npu_agent/{room}: {rooms[room]} statements, and budgets.toml allows {budgets[room]}"
        for room in sorted(rooms.keys() & budgets.keys())
        if rooms[room] > budgets[room]
    ]
    unknown = [
        f"npu_agent/{room}: add its budget to budgets.toml ({rooms[room]} statements)"
        for room in sorted(rooms.keys() - budgets.keys())
    ]
    gone = [
        f"npu_agent/{room}: remove its budget from budgets.toml"
        for room in sorted(budgets.keys() - rooms.keys())
    ]
    total = sum(rooms.values())
    all_of_it = [f"npu_agent: {total} statements, and budgets.toml allows {house}"]
    return over + unknown + gone + (all_of_it if total > house else [])


def habits(sources: dict[str, str]) -> Iterator[str]:
    """Long functions, classes that share a name, and names that say nothing, in files by name."""
    uses: Counter[str] = Counter()
    classes: dict[str, str] = {}
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    length = statements(node)
                    if length > LONGEST:
                        yield f"{file}: {node.name} has {length} statements, at most {LONGEST}"
                case ast.ClassDef():
                    if other := classes.get(node.name):
                        yield f"{file}: class {node.name} is in {other} too: give one another name"
                    classes[node.name] = file
                case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                    uses[name] += 1
    for name, most in VAGUE.items():
        if uses[name] > most:
            yield f"`{name}` {uses[name]} times, at most {most}: name locals after type or role"


def main() -> int:
    """Prints each violation; returns 1 if there is one."""
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text("utf-8"))
    package = ROOT / "npu_agent"
    wrong = violations(statements_by_room(package), budgets["rooms"], budgets["house"])
    files = (file for file in package.rglob("*.py") if "wire" not in file.parts)
    wrong += habits(
        {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in sorted(files)}
    )
    print("\n".join(wrong), end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
