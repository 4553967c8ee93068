"""Takes the pictures of the status page: `make pictures`, or `python -m docs.images.make`.

The page is the agent's own, shown by Chromium as in tests/outputs/web; the cards are made up. Needs
Chromium (`make packages`).
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent import __version__
from npu_agent.core.hardware import CardState, Cause, Snapshot
from npu_agent.core.problems.cards import named
from npu_agent.core.state import LabelState
from npu_agent.core.timeline import Timeline, TimelineEntry
from npu_agent.feed import Feed
from npu_agent.kubelet.podresources import Holdings
from npu_agent.outputs.web.history import History
from tests.outputs.deviceplugin.helpers import state as card
from tests.outputs.web.browser import tab
from tests.outputs.web.helpers import Scene, fenced, held, read, serving

HERE = Path(__file__).parent
_END = "document.getElementById('{}').getBoundingClientRect().bottom"
_WIDTH = 1200
"""Pixels."""
_UP = 266_000
"""Seconds that most cards have been well."""
_HOT = 43
"""The card of the picture with many that is 24 °C hotter than its load would make it."""

_VERSION = {"version": __version__}
_SERVICE = {"service": "beta.furiosa.ai/npu", "reason": "its stream ended"}
_POD = {"pod": "inference/llama-decode-0"}


@dataclass(frozen=True)
class Picture:
    """A picture of the page."""

    name: str
    scene: Scene
    end: str = "timeline"
    """The section that is the last one in it: what follows on the page is small print."""


def few() -> Scene:
    """Three RNGD cards: one that a Pod holds, one that died ten minutes ago, one that is free."""
    scene = _scene((82.0, 0.0, 0.0))
    cards = list(scene.cards)
    cards[1] = fenced(cards[1], "device_state says 0", 604, Cause.DEAD)
    held_by = held(cards[0], "llama-decode-0", namespace="inference")
    return replace(
        scene,
        cards=tuple(cards),
        holdings=Holdings(asked_at=1.0, assignments=(held_by,)),
        timeline=_timeline(
            (71_000, TimelineEntry("AgentStarted", facts=_VERSION, subject="agent")),
            (70_999, TimelineEntry("Registered", facts=_SERVICE, subject="resource")),
            (70_997, TimelineEntry("LabelsApplied", subject="labels")),
            (52_000, TimelineEntry("RegistrationLost", facts=_SERVICE, subject="resource")),
            (51_998, TimelineEntry("RegisteredAgain", facts=_SERVICE, subject="resource")),
            (30_300, TimelineEntry("ConfigApplied", subject="config")),
            (7_100, TimelineEntry("NPUGiven", named(cards[:1]), facts=_POD, subject="assignments")),
            (604, _died(cards[1])),
        ),
    )


def many() -> Scene:
    """64 cards: one is dead, one is hot, and two thirds are in use."""
    loads = [index % 3 and 20 + 70 * (0.5 + math.sin(index) / 2) for index in range(64)]
    loads[_HOT] = 88.0
    scene = _scene(tuple(loads))
    cards = list(scene.cards)
    cards[18] = fenced(cards[18], "device_state says 0", 604, Cause.DEAD)
    held_by = tuple(
        held(card, f"decode-{number}", namespace="inference")
        for number, card in enumerate(cards)
        if number % 3
    )
    return replace(
        scene,
        cards=tuple(cards),
        holdings=Holdings(asked_at=1.0, assignments=held_by),
        timeline=_timeline(
            (71_000, TimelineEntry("AgentStarted", facts=_VERSION, subject="agent")),
            (604, _died(cards[18])),
        ),
    )


def _died(card: CardState) -> TimelineEntry:
    return TimelineEntry("NPUUnhealthy", named([card]), facts={"why": card.health}, subject="card")


def _timeline(*happened: tuple[float, TimelineEntry]) -> Timeline:
    """Each with how many seconds ago it was."""
    found = Timeline()
    for ago, entry in happened:
        found = found.noted([entry], time.monotonic() - ago)
    return found


def _scene(loads: tuple[float, ...]) -> Scene:
    """Cards with these loads, and an hour of each."""
    cards = []
    for index in range(len(loads)):
        one = card(
            "rngd",
            index,
            id_=f"0C5B1E0A-93A1-4C8B-9D2B-4F6E0A7B1C{index:02X}",
            uuid=f"0C5B1E0A-93A1-4C8B-9D2B-4F6E0A7B1C{index:02X}",
            serial=f"RNGD{index:02}36FH505KREO",
            pci_bus_id=f"0000:{0x17 + 3 * index:02x}:00.0",
            numa_node=0,
            driver_version="2025.4.0, 7e25130",
            firmware_version="2025.4.0, c1bebfd",
        )
        cards.append(replace(one, health=replace(one.health, since=time.monotonic() - _UP)))
    history = History(Feed(Snapshot()))
    for step in range(119, -1, -1):
        cards = [
            _at(one, load, step, index)
            for index, (one, load) in enumerate(zip(cards, loads, strict=True))
        ]
        history.add(Snapshot(cards=tuple(cards), complete=True))
    labels = {
        "beta.furiosa.ai/npu.count": str(len(cards)),
        "beta.furiosa.ai/npu.family": "renegade",
        "beta.furiosa.ai/npu.product": "rngd",
        "beta.furiosa.ai/driver.version": "2025.4.0",
    }
    return Scene(
        version=__version__,
        cards=tuple(cards),
        labels=LabelState(
            output="api", labels=labels, in_place=True, applied_at=time.monotonic() - _UP
        ),
        history=history,
        started=time.monotonic() - 71_000,
    )


def _at(one: CardState, load: float, step: int, index: int) -> CardState:
    """The card as it was `step` half minutes ago."""
    wave = math.sin(step / 7 + index) + math.sin(step / 3 + 2 * index) / 2
    now = read(
        one,
        temperature=41 + load / 3 + 0.8 * wave + (24 if index == _HOT else 0),
        power=53 + load + (0.6 + load / 20) * wave,
        age=step * 30.0,
    )
    assert now.reading is not None  # noqa: S101  (for the type checker)
    cores = tuple(
        replace(core, utilization=max(0.0, load + core.core % 3 + 4 * wave) if load else 0.0)
        for core in now.reading.cores
    )
    return replace(now, reading=replace(now.reading, cores=cores))


async def main() -> None:
    """Writes the pictures."""
    for picture in (
        Picture("status.png", few(), end="cards"),
        Picture("status-many.png", many()),
    ):
        async with serving(picture.scene) as (host, port), tab() as page:
            await page.screen(_WIDTH)
            await page.say("Emulation.setScrollbarsHidden", hidden=True)
            await page.open(f"http://{host}:{port}/")
            await page.until("document.fonts.ready.then(() => true)")
            height = await page.run(_END.format(picture.end)) + 20
            clip = {"x": 0, "y": 0, "width": _WIDTH, "height": height, "scale": 1}
            shot = await page.say("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        (HERE / picture.name).write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    asyncio.run(main())
