"""The recorded tour in the READMEs is the golden one, and a picture that every browser can show."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.commands.tour import GOLDEN

from .pages import ROOT, page

IMAGES = ROOT / "docs/images"
MOVING, STANDING = IMAGES / "demo.svg", IMAGES / "demo-still.svg"
NAMESPACE = "{http://www.w3.org/2000/svg}"
TOUR = f"$ npu-agent demo --once\n{GOLDEN.read_text()}"


def rows(picture: Path) -> list[str]:
    """The rows of the terminal."""
    root = ElementTree.parse(picture).getroot()
    assert root.tag == f"{NAMESPACE}svg"
    found = root.findall(f".//{NAMESPACE}text[@class='row']")
    return [" ".join(run.text or "" for run in row) for row in found]


def packed(text: str) -> str:
    """Without spaces and line ends: the picture breaks long lines."""
    return re.sub(r"\s", "", text)


def test_it_is_the_tour_as_it_is_today() -> None:
    recorded = packed("".join(rows(MOVING)))
    assert recorded == packed(TOUR), "the tour has changed since: make recording"


def test_the_still_is_a_part_of_it_in_which_a_pod_gets_its_npu() -> None:
    shown = rows(STANDING)
    assert packed("".join(shown)) in packed(TOUR)
    assert "5. A Pod asks for one NPU" in shown
    assert any("NPU_DEVNAME=npu0pe0-1" in row for row in shown)


def test_every_row_is_seen_well_within_a_minute() -> None:
    text = MOVING.read_text()
    [seconds] = set(re.findall(r"animation:\w+ ([\d.]+)s step-end infinite", text))
    assert float(seconds) < 45
    hidden = re.search(r"@keyframes hide\{(.+)\}\n", text)
    assert hidden
    shown = [int(px) for px in re.findall(r"translateY\((\d+)px\)", hidden[1])]
    assert shown == sorted(shown)
    lowest = max(int(y) for y in re.findall(r'class="row" y="(\d+)"', text))
    assert shown[-1] > lowest


@pytest.mark.parametrize("picture", [MOVING, STANDING], ids=lambda path: path.name)
def test_it_is_small_and_needs_nothing_but_itself(picture: Path) -> None:
    text = picture.read_text()
    assert len(text.encode()) < 200_000
    assert not re.search(r"<script|<foreignObject|href|@import|url\(|\bon\w+=", text, re.IGNORECASE)
    assert "prefers-color-scheme:dark" in text
    root = ElementTree.fromstring(text)
    named = [root.findtext(f"{NAMESPACE}{name}") for name in ("title", "desc")]
    assert all(named)


@pytest.mark.parametrize("name", ["README.md", "README.ko.md", "README.ja.md"])
def test_the_readmes_show_it(name: str) -> None:
    text = page(name).text
    [picture] = re.findall(r"<picture>.*?</picture>", text, re.DOTALL)
    [still] = re.findall(
        r'<source media="\(prefers-reduced-motion: reduce\)" srcset="([^"]+)">', picture
    )
    [(alt, moving)] = re.findall(r'<img alt="([^"]+)" src="([^"]+)">', picture)
    assert (ROOT / moving, ROOT / still) == (MOVING, STANDING)
    assert len(alt) > 20
