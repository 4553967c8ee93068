"""How late the event loop is: everything on it waits that long, Allocate among it."""

from __future__ import annotations

import asyncio
import time

from npu_agent.outputs.deviceplugin.counts import Histogram

_EVERY = 0.5
"""Seconds. At the moments at which the cards are looked at, which a glance at the lag should see;
so it wakes nobody of its own (`npu_agent.inventory.inventory`)."""
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Measures twice a second how much later than asked for the loop gets round to something.

    A histogram and not the worst since the last scrape: it serves any number of scrapers, and
    nothing is lost when one scrape is.
    """

    def __init__(self) -> None:
        self.seconds = Histogram(_BOUNDS)
        """The lags so far."""

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            now = time.monotonic()
            due = now + _EVERY - now % _EVERY
            await asyncio.sleep(due - now)
            self.seconds.add(max(0.0, time.monotonic() - due))
