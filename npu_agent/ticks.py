"""When the event loop works: periodic work at the same moments, long work in turns with others."""

from __future__ import annotations

import asyncio
import time

PHASE = 0.25
"""Seconds. The cards are probed at full and half seconds; what looks at files does so between two
probes, so that its thread and theirs do not wait for each other."""
_TURN = 0.0005
"""Seconds of long work between two turns for others."""


def until_tick(every: float, phase: float = PHASE) -> float:
    """Seconds until the next moment of those that are `every` seconds apart.

    They are the same for all that have the same period: an idle agent wakes up once for all of them
    and not once for each.
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


class Turns:
    """Lets others have their turns during long work, and wakes nobody during short work."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + _TURN

    async def take(self) -> None:
        """To be called every fraction of a millisecond."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + _TURN
