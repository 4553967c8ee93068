"""When the event loop works: periodic work at the same moments."""

from __future__ import annotations

import asyncio
import time


def until_tick(every: float) -> float:
    """Seconds until the next of the moments that are `every` seconds apart.

    All with the same period have the same moments, so that an idle agent wakes up once for all.
    """
    return every - time.monotonic() % every


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Waits for `event`, for so many seconds at most; returns whether it is set by then."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
