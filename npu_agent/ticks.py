"""Times: periodic work of the event loop at the same moments, and how a time is written."""

from __future__ import annotations

import asyncio
import time


def until_tick(every: float) -> float:
    """Seconds until the next of the moments that are `every` seconds apart.

    All with the same period have the same moments, so that an idle agent wakes up once for all.
    """
    return every - time.monotonic() % every


STAMP = "%Y-%m-%dT%H:%M:%SZ"
"""RFC 3339 in UTC and whole seconds: Kubernetes' `Time`."""


def stamp(at: float | None = None) -> str:
    """A time of the wall clock as `STAMP`; None: now."""
    return time.strftime(STAMP, time.gmtime(at))


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Waits for `event`, for so many seconds at most; returns whether it is set by then."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
