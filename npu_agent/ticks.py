"""When the event loop works: periodic work at the same moments."""

from __future__ import annotations

import asyncio
import time

PHASE = 0.25
"""Seconds. The cards are probed at full and half seconds. Files are checked between two probes, so
that the threads do not wait for each other."""


def until_tick(every: float, phase: float = PHASE) -> float:
    """Seconds until the next of the moments that are `every` seconds apart.

    All with the same period have the same moments, so that an idle agent wakes up once for all.
    """
    return every - (time.monotonic() - phase) % every


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Waits for `event`, for so many seconds at most; returns whether it is set by then."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
