"""docs/labels.md lists every label of every set, and no other."""

from __future__ import annotations

import re

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
