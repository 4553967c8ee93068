"""docs/dra-reference.md has every attribute and taint of the code."""

from __future__ import annotations

import re

from npu_agent.core.hardware import CardState, Health, HealthState
from npu_agent.core.offer import cut
from npu_agent.core.plan import DEGRADED, taints
from npu_agent.core.trends import TrendKind
from npu_agent.vendors.furiosa.attributes import DRA
from tests.docs.pages import ROOT, Page


def _first_column(heading: str) -> set[str]:
    """The names in the first cells of the table below a heading."""
    text = Page(ROOT / "docs" / "dra-reference.md").text
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\|([^|]+)\|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_reference_has_every_attribute() -> None:
    card = DRA.blank("rngd", 0)
    known = DRA.describe(card, card.all_cores).attributes.keys() | {*DRA.of_host}
    assert _first_column("Attributes") == known | {DEGRADED}


def test_the_reference_has_every_taint() -> None:
    health = Health(state=HealthState.UNHEALTHY, reason="", since=0.0)
    (device,) = cut(CardState(id="a", card=DRA.blank("rngd", 0), health=health), 8)
    found = taints(DRA.driver, device, held=True, cordoned=True, trends=[*TrendKind])
    assert _first_column("Taints") == {taint.key for taint in found}
