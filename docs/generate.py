"""Writes what is derived: `make docs`.

From the code, each between two marks: the reference of the configuration's keys in
configuration.md, in hardware.md the files that are read by a guess, and in alerts.md what to do
about an unhealthy card.
From the chart's values.yaml, the tables of its README (docs/chart.py).
In translated pages, the line that says that the English page is newer (docs/translations.py);
the exit code is 1 if one lacks a list item or a row of a table.
With --check nothing is written; the exit code is 1 if a page is not what it would be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import MISSING
from functools import partial
from pathlib import Path

import chart
import translations
from parts import cell, current

from npu_agent.config.schema import Group, Key, keys_of, schema_of
from npu_agent.config.text import as_yaml
from npu_agent.core.hardware import Cause
from npu_agent.vendors import SPEC
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from npu_agent.wording import ENGLISH

KEYS = tuple(keys_of(schema_of(SPEC)))

CONFIGURATION = Path(__file__).parent / "configuration.md"
HARDWARE = Path(__file__).parent / "dev/hardware.md"
ALERTS = Path(__file__).parent / "alerts.md"


def reference() -> str:
    """The tables of all keys, in Markdown."""
    lines = [
        "| key | type | default | applies | meaning |",
        "|---|---|---|---|---|",
        *(_row(key) for key in KEYS),
    ]
    for key in KEYS:
        lines += _items(key)
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    cells = (
        f"`{key.name}`",
        _type(key),
        f"`{as_yaml(key.default)}`",
        "live" if key.live else "restart",
        cell(key.description),
    )
    return f"| {' | '.join(cells)} |"


def _items(key: Key) -> Iterator[str]:
    """The table of what an item of a list of groups has."""
    if not isinstance(key.of, Group):
        return
    yield from ("", f"An item of `{key.name}`:", "", "| key | type | needed | meaning |")
    yield "|---|---|---|---|"
    for each in key.of.keys.values():
        needed = "yes" if each.default is MISSING else "no"
        yield f"| `{each.name}` | {_type(each)} | {needed} | {cell(each.description)} |"


def _type(key: Key) -> str:
    """What values there are, with their range: ``number (seconds), 0.1 to 3600``."""
    if isinstance(key.of, Group):
        return "list of items, see below"
    found = cell(key.of.must)
    match key.of.json:
        case {"enum": words}:
            found = ", ".join(f"`{as_yaml(word)}`" for word in words if isinstance(word, str))
        case {"type": "boolean"}:
            found = "`true`, `false`"
        case {"minimum": _}:
            found = key.of.must.removeprefix("a ")
    return f"list of {found}" if key.many else found


def unproven() -> str:
    """The table of files whose format is not public, in Markdown."""
    lines = [
        "| family | file | what is public | what is guessed | metrics |",
        "|---|---|---|---|---|",
    ]
    for family in FAMILIES.values():
        for one in family.unproven:
            names = sorted(
                {
                    metric.name
                    for schema in SCHEMAS.values()
                    for metric in schema.metrics
                    if metric.source in one.quantities
                }
            )
            metrics = ", ".join(f"`{name}`" for name in names)
            lines.append(
                f"| {family.name} | `{one.file}` | {one.known} | {one.guessed} | {metrics} |"
            )
    return "\n".join(lines) + "\n"


def causes() -> str:
    """The table of what makes a card unhealthy, and what to do about it, in Markdown."""
    lines = ["| cause | means | what to do |", "|---|---|---|"]
    for cause in Cause:
        words = ENGLISH.of_cause(cause)
        lines.append(f"| {cause.value} | {words.means} | {words.remedy} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    code = 0
    for file, source, make in (
        (
            CONFIGURATION,
            "the schema says",
            lambda: current(CONFIGURATION, "npu_agent/config/schema.py", reference()),
        ),
        (
            HARDWARE,
            "the families say",
            lambda: current(HARDWARE, "npu_agent/vendors/furiosa/", unproven()),
        ),
        (
            ALERTS,
            "the table of words says",
            lambda: current(ALERTS, "npu_agent/wording/en.json", causes()),
        ),
        (chart.FILE, "values.yaml says", chart.current),
        *(
            (page, "its English page says", partial(translations.current, page))
            for page in translations.pages()
        ),
    ):
        fresh = make()
        if file.exists() and file.read_text(encoding="utf-8") == fresh:
            continue
        if args.check:
            print(f"{file} is not what {source}: run `make docs`", file=sys.stderr)
            code = 1
        else:
            file.write_text(fresh, encoding="utf-8")
    for page in filter(translations.lags, translations.pages()):
        print(f"{page.relative_to(translations.ROOT)}: the English page has changed since")
    for page in translations.pages():
        for difference in translations.differences(page):
            print(difference, file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
