"""README.md is one page in three languages; its figures and its command are real."""

from __future__ import annotations

import re
import subprocess

import pytest

from .pages import ROOT, Page, page

ENGLISH = page("README.md")
KOREAN, JAPANESE = page("README.ko.md"), page("README.ja.md")
BENCHMARKS = page("docs/benchmarks.md")
OTHERS = pytest.mark.parametrize("other", [KOREAN, JAPANESE], ids=["ko", "ja"])


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


def rows(text: str, heading: str) -> dict[str, str]:
    """First and last cell of each row of the first table with this header row."""
    table = text.partition(f"{heading}\n|")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [row.strip("| ").split(" | ") for row in table]
    return {row[0]: row[-1] for row in cells}


def test_the_table_is_a_few_rows_of_one_run() -> None:
    shown = rows(ENGLISH.text, "| figure | measured |")
    assert 0 < len(shown) <= 4
    [date] = re.findall(r"measured on ([\d-]+)", ENGLISH.text)
    runs = re.split(r"measured on (?=\d)", BENCHMARKS.text)[1:]
    assert any(
        run.startswith(date)
        and shown.items() <= rows(run, "| figure | target | measured |").items()
        for run in runs
    )


def test_the_one_file_is_installed_with_the_image_of_ones_own() -> None:
    (command,) = re.findall(r"^\$ (sed .*) \| kubectl apply -f -$", ENGLISH.text, re.MULTILINE)
    made = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True).stdout
    before = (ROOT / "k8s/npu-agent.yaml").read_text().splitlines()
    changed = [(a, b) for a, b in zip(before, made.splitlines(), strict=True) if a != b]
    (build,) = re.findall(r"make image IMAGE=(\S+)", ENGLISH.text)
    assert [(a.strip(), b.strip()) for a, b in changed] == [
        ("image: npu-agent:0.1.0", f"image: {build}")
    ]
