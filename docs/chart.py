"""The tables of the chart's values in k8s/chart/README.md, made of values.yaml and its comments.

``## Heading`` begins a table. What is said of a key stands above it or behind it. A mapping whose
keys say nothing is one value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parts
import yaml

CHART = Path(__file__).resolve().parents[1] / "k8s/chart"
FILE = CHART / "README.md"


def current() -> str:
    """The README with its tables as they should be.

    Raises:
        ValueError: the marks are not there, or a key of values.yaml has no comment.
    """
    tables = "\n".join(_tables((CHART / "values.yaml").read_text(encoding="utf-8")))
    return parts.current(FILE, "values.yaml", f"{tables}\n")


def _tables(text: str) -> Iterator[str]:
    lines = text.splitlines()
    headings = [(number, line[3:]) for number, line in enumerate(lines) if line.startswith("## ")]
    rows = list(_rows(yaml.compose(text), lines, ""))
    for (begin, heading), (end, _) in zip(headings, [*headings[1:], (len(lines), "")], strict=True):
        yield from (f"### {heading}", "", "| value | default | |", "|---|---|---|")
        yield from (row for number, row in rows if begin < number < end)
        if end < len(lines):
            yield ""


def _rows(mapping: Any, lines: list[str], prefix: str) -> Iterator[tuple[int, str]]:
    for key, value in mapping.value:
        name, number = f"{prefix}{key.value}", key.start_mark.line
        said = _comment(lines, number)
        inner = value.value and isinstance(value, yaml.MappingNode) and not value.flow_style
        below = inner and any(_comment(lines, one.start_mark.line) for one, _ in value.value)
        if not said and not below:
            raise ValueError(f"values.yaml:{number + 1}: say in a comment what {name} is")
        default = "" if below else f"`{_flow(value)}`"
        if said:
            yield number, f"| `{name}` | {default} | {_cell(said)} |"
        if below:
            yield from _rows(value, lines, f"{name}.")


def _comment(lines: list[str], number: int) -> str:
    """What is said of the key of that line."""
    indent, above = re.match(r" *", lines[number]), []
    for line in reversed(lines[:number]):
        if not indent or not re.match(rf"{indent[0]}# ", line):
            break
        above.append(line.strip().removeprefix("# "))
    _, _, behind = lines[number].partition(" # ")
    return " ".join([*reversed(above), behind]).strip()


def _flow(node: yaml.Node) -> str:
    value = yaml.safe_load(yaml.serialize(node))
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").replace("|", "\\|")


def _cell(text: str) -> str:
    """Names of pages as links; no full stop at the end."""
    linked = re.sub(r"\((docs/[\w./-]+\.md)(#[\w-]+)?\)", r"([\1](../../\1\2))", text)
    return parts.cell(linked)
