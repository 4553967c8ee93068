"""How late the event loop is: everything on it waits that long, Allocate among it."""

from __future__ import annotations

import asyncio
import time

from npu_agent.outputs.deviceplugin.counts import Histogram
from npu_agent.ticks import until_tick

_EVERY = 1.0
"""Seconds, at the moments of other periodic work: so it costs no wake-up of its own."""
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Measures once a second how much later than asked for the loop gets round to something.

    A histogram and not the worst since the last scrape: it serves any number of scrapers, and
    nothing is lost when one scrape is.
    """

    def __init__(self) -> None:
        self.seconds = Histogram(_BOUNDS)
        """The lags so far."""

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            due = time.monotonic() + until_tick(_EVERY)
            await asyncio.sleep(due - time.monotonic())
            self.seconds.add(max(0.0, time.monotonic() - due))
