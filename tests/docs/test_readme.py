"""README.md is one page in three languages; its figures and its command are real."""

from __future__ import annotations

import re
import subprocess

import pytest

from bench import report
from npu_agent.config import parse
from npu_agent.vendors import SPEC

from .pages import ROOT, Page, page

ENGLISH = page("README.md")
KOREAN, JAPANESE = page("README.ko.md"), page("README.ja.md")
BENCHMARKS = page("docs/benchmarks.md")
OTHERS = pytest.mark.parametrize("other", [KOREAN, JAPANESE], ids=["ko", "ja"])


@OTHERS
def test_both_readmes_have_the_same_commands(other: Page) -> None:
    def commands(blocks: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(language, re.sub(r" +#.*", "", code)) for language, code in blocks]

    assert commands(ENGLISH.blocks) == commands(other.blocks)
    assert sorted(ENGLISH.inline) == sorted(other.inline)


@OTHERS
def test_both_readmes_link_to_the_same_places(other: Page) -> None:
    def places(links: list[str]) -> list[str]:
        """English pages; the README of a language may lead to its own."""
        plain = {re.sub(r"^docs/(ko|ja)/", "docs/", link).partition("#")[0] for link in links}
        return sorted(link for link in plain if not re.fullmatch(r"README(\.ko|\.ja)?\.md", link))

    assert places(ENGLISH.links) == places(other.links)


@pytest.mark.parametrize("one", [ENGLISH, KOREAN, JAPANESE], ids=["en", "ko", "ja"])
def test_the_figures_are_those_of_the_benchmarks(one: Page) -> None:
    """`make bench` writes both."""
    shown = dict(re.findall(r"<!-- (.+?) -->(.+?) \|", one.text))
    peers = {name: value for name, value in shown.items() if name.startswith(report.PEERS)}
    assert (len(shown) - len(peers), len(peers)) == (5, 11)
    run, rows = table(report.BEGIN)
    figures = {row[0]: row[-1] for row in rows}
    assert shown.items() - peers.items() <= {report.DATE: run, **figures}.items()
    run, (header, *rows) = table(report.PEERS_BEGIN)
    cells = {
        f"{who}: {row[0]}": cell for row in rows for who, cell in zip(header, row, strict=True)
    }
    named = {f"{report.PEERS}{name}": cell for name, cell in {report.DATE: run, **cells}.items()}
    assert peers.items() <= named.items()


def table(begin: str) -> tuple[str, list[list[str]]]:
    """The day and the rows of a table that a run of the bench has written."""
    _, _, rest = BENCHMARKS.text.partition(begin)
    written, _, _ = rest.partition(report.END)
    lines = [line for line in written.splitlines() if line.startswith("|")]
    return written.strip()[:10], [
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines
    ]


def test_the_value_for_rngd_is_a_config_that_offers_the_name_in_the_pod() -> None:
    [(key, value)] = re.findall(r"--set-json 'config\.(\w+)=(.+?)'", ENGLISH.text)
    config = parse(f"{key}: {value}".encode(), "README.md", SPEC).config
    assert [one.name for one in config.resources] == re.findall(
        r"# (furiosa\.ai/\w+): 1", ENGLISH.text
    )


def test_the_one_file_is_installed_with_the_image_of_ones_own() -> None:
    (command,) = re.findall(r"^\$ (sed .*) \| kubectl apply -f -$", ENGLISH.text, re.MULTILINE)
    made = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True).stdout
    before = (ROOT / "k8s/npu-agent.yaml").read_text(encoding="utf-8").splitlines()
    changed = [(a, b) for a, b in zip(before, made.splitlines(), strict=True) if a != b]
    (build,) = re.findall(r"make image IMAGE=(\S+)", ENGLISH.text)
    assert [(a.strip(), b.strip()) for a, b in changed] == [
        ("image: npu-agent:0.1.0", f"image: {build}")
    ]
