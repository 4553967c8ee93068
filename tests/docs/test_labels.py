"""docs/labels.md lists every label of every set, and no other."""

from __future__ import annotations

import re

from npu_agent.outputs.labels import compute
from npu_agent.vendors.furiosa.labels import SETS

from .pages import page

TEXT = page("docs/labels.md").text


def test_the_table_is_the_code() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| ((?:alpha|beta|current)[\w, ]*) \|", TEXT, re.MULTILINE)
    listed = {(name, SETS[name].prefix + key) for key, sets in rows for name in sets.split(", ")}
    assert listed == {(name, key) for name, keys in SETS.items() for key in keys.keys}
    assert len(rows) == len({key for key, _ in rows}), "a row for each key"


def test_the_prefixes_are_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| `([\w.]+/)` \|", TEXT, re.MULTILINE)
    assert dict(rows) == {name: set_.prefix for name, set_ in SETS.items()}


def test_examples_are_what_the_code_makes() -> None:
    pairs = re.findall(r"`([^`]+)` becomes `([^`]+)`", TEXT)
    assert len(pairs) >= 2
    assert [compute.value(text) for text, _ in pairs] == [value for _, value in pairs]
