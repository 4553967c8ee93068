"""README.md is one page in three languages, and its picture is small."""

from __future__ import annotations

import re
import struct
import subprocess

import pytest

from .pages import ROOT, Page, page

ENGLISH = page("README.md")
OTHERS = pytest.mark.parametrize(
    "other", [page("README.ko.md"), page("README.ja.md")], ids=["ko", "ja"]
)


@OTHERS
def test_both_have_the_same_sections(other: Page) -> None:
    assert [level for level, _ in ENGLISH.headings] == [level for level, _ in other.headings]


@OTHERS
def test_both_have_the_same_commands(other: Page) -> None:
    def commands(blocks: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(language, re.sub(r" +#.*", "", code)) for language, code in blocks]

    assert commands(ENGLISH.blocks) == commands(other.blocks)
    assert sorted(ENGLISH.inline) == sorted(other.inline)


@OTHERS
def test_both_lead_to_the_same_places(other: Page) -> None:
    def places(links: list[str]) -> list[str]:
        """English pages; the README of a language may lead to its own."""
        plain = {re.sub(r"^docs/(ko|ja)/", "docs/", link).partition("#")[0] for link in links}
        return sorted(link for link in plain if not re.fullmatch(r"README(\.ko|\.ja)?\.md", link))

    assert places(ENGLISH.links) == places(other.links)


@OTHERS
def test_both_have_the_same_figures(other: Page) -> None:
    def figures(text: str) -> list[list[str]]:
        table = text[text.index("| | npu-agent |") :].split("\n\n", maxsplit=1)[0]
        table = table.replace("one process", "1").replace("three processes", "3")
        return [sorted(re.findall(r"\d+(?:\.\d+)?", row)) for row in table.splitlines()]

    assert figures(ENGLISH.text) == figures(other.text)


def test_the_picture_is_small_and_wide_enough() -> None:
    picture = (ROOT / "docs/images/status.png").read_bytes()
    assert len(picture) < 150_000
    assert struct.unpack(">I", picture[16:20])[0] >= 1100


def test_the_one_file_is_installed_with_the_image_of_ones_own() -> None:
    (command,) = re.findall(r"^\$ (sed .*) \| kubectl apply -f -$", ENGLISH.text, re.MULTILINE)
    made = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True).stdout
    before = (ROOT / "k8s/npu-agent.yaml").read_text().splitlines()
    changed = [(a, b) for a, b in zip(before, made.splitlines(), strict=True) if a != b]
    (build,) = re.findall(r"make image IMAGE=(\S+)", ENGLISH.text)
    assert [(a.strip(), b.strip()) for a, b in changed] == [
        ("image: npu-agent:0.1.0", f"image: {build}")
    ]
