"""How late the event loop is: everything on it waits that long, Allocate included."""

from __future__ import annotations

import asyncio
import time

from npu_agent.core.counts import Histogram

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Measures how much later than asked the loop wakes it.

    A histogram serves any number of scrapers, and loses nothing with a lost scrape.
    """

    def __init__(self, interval: float = 5.0) -> None:
        """`interval` is in seconds."""
        self._interval = interval
        self.seconds = Histogram(_BOUNDS)

    async def run(self) -> None:
        while True:
            due = time.monotonic() + self._interval
            await asyncio.sleep(self._interval)
            self.seconds.add(max(0.0, time.monotonic() - due))
