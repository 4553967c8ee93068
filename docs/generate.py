"""Writes what can be derived from the code into the pages of docs/: `make docs`.

Today that is the reference of the configuration's keys in configuration.md, between two marks.
With --check nothing is written; the exit code is 1 if a page is not what it would be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import inspect as mi

from npu_agent.config.schema import Key, plain, schema_of
from npu_agent.config.text import as_yaml
from npu_agent.vendors import WORDS

SCHEMA = schema_of(WORDS)

PAGE = Path(__file__).parent / "configuration.md"
BEGIN = "<!-- from npu_agent/config/schema.py by `make docs`: begin -->\n"
END = "<!-- end -->\n"


def reference() -> str:
    """The tables of all keys, in Markdown."""
    lines = [
        "| key | option | type | default | applies | meaning |",
        "|---|---|---|---|---|---|",
        *(_row(key) for key in SCHEMA.keys),
    ]
    for key in SCHEMA.keys:
        lines += _items(key)
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    cells = (
        f"`{key.name}`",
        f"`{key.option}`",
        _type(*_described(key)),
        f"`{as_yaml(key.default)}`",
        "live" if key.live else "restart",
        _cell(key.description),
    )
    return f"| {' | '.join(cells)} |"


def _described(key: Key) -> tuple[mi.Type, dict[str, Any]]:
    """The key's type and the notes on it, which a `Key` has only in part."""
    kind: mi.Type = SCHEMA.root
    notes: dict[str, Any] = {}
    for attribute in key.attributes:
        assert isinstance(kind, mi.StructType)  # noqa: S101  (for the type checker)
        [field] = (each for each in kind.fields if each.name == attribute)
        kind, notes = plain(field.type)
    return kind, notes


def _items(key: Key) -> Iterator[str]:
    """The table of what an item of a list of groups has."""
    if not (
        isinstance(key.kind, mi.VarTupleType) and isinstance(key.kind.item_type, mi.StructType)
    ):
        return
    yield from ("", f"An item of `{key.name}`:", "", "| key | type | needed | meaning |")
    yield "|---|---|---|---|"
    for field in key.kind.item_type.fields:
        kind, notes = plain(field.type)
        needed = "yes" if field.required else "no"
        meaning = _cell(notes["description"])
        yield f"| `{field.encode_name}` | {_type(kind, notes)} | {needed} | {meaning} |"


def _type(kind: mi.Type, notes: dict[str, Any]) -> str:
    """What values there are, with their range: ``number (seconds), 0.1 to 3600``."""
    unit = f" ({notes['unit']})" if "unit" in notes else ""
    match kind:
        case mi.LiteralType(values):
            return ", ".join(f"`{as_yaml(value)}`" for value in values)
        case mi.BoolType():
            return "`true`, `false`"
        case mi.IntType():
            return f"whole number{unit}, {kind.ge:g} to {kind.le:g}"
        case mi.FloatType():
            return f"number{unit}, {kind.ge:g} to {kind.le:g}"
        case mi.VarTupleType(item):
            return f"list of {_type(*plain(item))}"
        case mi.StructType():
            return "items, see below"
        case mi.StrType():
            return _cell(notes["must"])
    raise AssertionError(kind)


def _cell(text: str) -> str:
    return text.removesuffix(".").replace("|", "\\|").replace("<", "\\<")


def current(page: str) -> str:
    """The page with its generated part made anew.

    Raises:
        ValueError: the marks are not there, or in disorder.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has lost its marks {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{reference()}\n{END}{after}"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    page = PAGE.read_text()
    fresh = current(page)
    if page == fresh:
        return 0
    if args.check:
        print(f"{PAGE} is not what the schema says: run `make docs`", file=sys.stderr)
        return 1
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
