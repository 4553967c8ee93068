"""Takes the picture of the status page in README.md: `python -m docs.images.make` at the root.

The page is the agent's own, shown by Chromium as in tests/outputs/web; the cards are made up. Needs
Chromium (`make packages`).
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from dataclasses import replace
from pathlib import Path

from npu_agent import __version__
from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.state import LabelState
from npu_agent.feed import Feed
from npu_agent.kubelet.podresources import Holdings
from npu_agent.outputs.web.history import History
from tests.outputs.deviceplugin.helpers import state as card
from tests.outputs.web.browser import tab
from tests.outputs.web.helpers import Scene, fenced, held, read, serving

PICTURE = Path(__file__).with_name("status.png")
_WIDTH = 1200
"""Pixels."""
_END = "document.getElementById('assignments').getBoundingClientRect().bottom"
"""Where the picture ends: what follows on the page is small print."""
_UP = 266_000
"""Seconds that the agent and most cards have been well."""


def scene() -> Scene:
    """Three RNGD cards: one that a Pod holds, one that died ten minutes ago, one that is free."""
    loads = (82.0, 0.0, 0.0)
    cards = []
    for index in range(len(loads)):
        one = card(
            "rngd",
            index,
            id_=f"0C5B1E0A-93A1-4C8B-9D2B-4F6E0A7B1C0{index}",
            uuid=f"0C5B1E0A-93A1-4C8B-9D2B-4F6E0A7B1C0{index}",
            serial=f"RNGD0{index}36FH505KREO",
            pci_bus_id=f"0000:{0x17 + 0x10 * index:02x}:00.0",
            numa_node=0,
            driver_version="2025.4.0, 7e25130",
            firmware_version="2025.4.0, c1bebfd",
        )
        cards.append(replace(one, health=replace(one.health, since=time.time() - _UP)))
    history = History(Feed(Snapshot()))
    for step in range(60, -1, -1):
        cards = [
            _at(one, load, step, index)
            for index, (one, load) in enumerate(zip(cards, loads, strict=True))
        ]
        history.add(Snapshot(cards=tuple(cards), complete=True))
    cards[1] = fenced(cards[1], "device_state says 0", 604)
    labels = {
        "beta.furiosa.ai/npu.count": "3",
        "beta.furiosa.ai/npu.family": "renegade",
        "beta.furiosa.ai/npu.product": "rngd",
        "beta.furiosa.ai/driver.version": "2025.4.0",
    }
    return Scene(
        version=__version__,
        cards=tuple(cards),
        holdings=Holdings(
            asked_at=1.0, assignments=(held(cards[0], "llama-decode-0", namespace="inference"),)
        ),
        labels=LabelState(output="api", labels=labels, in_place=True, applied_at=time.time() - _UP),
        history=history,
        started=time.time() - _UP,
    )


def _at(one: CardState, load: float, step: int, index: int) -> CardState:
    """The card as it was `step` readings ago."""
    wave = math.sin(step / 7 + index) + math.sin(step / 3 + 2 * index) / 2
    now = read(
        one,
        temperature=41 + load / 3 + 0.8 * wave,
        power=53 + load + (0.6 + load / 20) * wave,
        age=step * 5.0,
    )
    assert now.reading is not None  # noqa: S101  (for the type checker)
    cores = tuple(
        replace(core, utilization=max(0.0, load + core.core % 3 + 4 * wave) if load else 0.0)
        for core in now.reading.cores
    )
    return replace(now, reading=replace(now.reading, cores=cores))


async def main() -> None:
    """Writes the picture."""
    async with serving(scene()) as (host, port), tab() as page:
        await page.screen(_WIDTH)
        await page.say("Emulation.setScrollbarsHidden", hidden=True)
        await page.open(f"http://{host}:{port}/")
        await page.until("document.fonts.ready.then(() => true)")
        height = await page.run(_END) + 20
        clip = {"x": 0, "y": 0, "width": _WIDTH, "height": height, "scale": 1}
        shot = await page.say("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    PICTURE.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    asyncio.run(main())
