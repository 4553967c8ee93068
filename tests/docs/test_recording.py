"""The recorded tour in the READMEs is the golden one, and a picture that every browser can show."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from tests.people.commands.tour import GOLDEN

from .pages import ROOT

IMAGES = ROOT / "docs/images"
MOVING, STANDING = IMAGES / "demo.svg", IMAGES / "demo-still.svg"
NAMESPACE = "{http://www.w3.org/2000/svg}"
TOUR = f"$ npu-agent demo --once\n{GOLDEN.read_text(encoding='utf-8')}"


def rows(picture: Path) -> list[str]:
    """The rows of the terminal."""
    root = ElementTree.parse(picture).getroot()
    assert root.tag == f"{NAMESPACE}svg"
    found = root.findall(f".//{NAMESPACE}text[@class='row']")
    return [" ".join(run.text or "" for run in row) for row in found]


def packed(text: str) -> str:
    """Without spaces and line ends: the picture breaks long lines."""
    return re.sub(r"\s", "", text)


def test_the_recording_is_the_tour_as_it_is_today() -> None:
    recorded = packed("".join(rows(MOVING)))
    assert recorded == packed(TOUR), "the tour has changed since: make recording"


def test_the_still_is_a_part_of_it_in_which_a_pod_gets_its_npu() -> None:
    shown = rows(STANDING)
    assert packed("".join(shown)) in packed(TOUR)
    assert "5. A Pod asks for one NPU" in shown
    assert any("NPU_DEVNAME=npu0pe0-1" in row for row in shown)
