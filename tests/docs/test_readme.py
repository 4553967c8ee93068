"""README.md and README.ko.md are one page in two languages, and their picture is small."""

from __future__ import annotations

import re
import struct

from .pages import ROOT, page

ENGLISH, KOREAN = page("README.md"), page("README.ko.md")


def test_both_have_the_same_sections() -> None:
    assert [level for level, _ in ENGLISH.headings] == [level for level, _ in KOREAN.headings]


def test_both_have_the_same_commands() -> None:
    def commands(blocks: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(language, re.sub(r" +#.*", "", code)) for language, code in blocks]

    assert commands(ENGLISH.blocks) == commands(KOREAN.blocks)
    assert sorted(ENGLISH.inline) == sorted(KOREAN.inline)


def test_both_lead_to_the_same_places() -> None:
    other = {"README.md", "README.ko.md"}
    assert ENGLISH.links[0] == "README.ko.md"
    assert KOREAN.links[0] == "README.md"
    assert sorted(set(ENGLISH.links) - other) == sorted(set(KOREAN.links) - other)


def test_both_have_the_same_figures() -> None:
    def figures(text: str) -> list[list[str]]:
        table = text[text.index("| | npu-agent |") :].split("\n\n", maxsplit=1)[0]
        table = table.replace("one process", "1").replace("three processes", "3")
        return [sorted(re.findall(r"\d+(?:\.\d+)?", row)) for row in table.splitlines()]

    assert figures(ENGLISH.text) == figures(KOREAN.text)


def test_the_picture_is_small_and_wide_enough() -> None:
    picture = (ROOT / "docs/images/status.png").read_bytes()
    assert len(picture) < 150_000
    assert struct.unpack(">I", picture[16:20])[0] >= 1100
