"""Whether the pages with readings are read: while they are not, the cards are read seldom."""

from __future__ import annotations

import asyncio
import time

from npu_agent.feed import Feed

UNREAD_INTERVAL = 60.0
"""Seconds between two readings that no client asks for: enough for trends."""
_REMEMBERED = 120.0
"""Seconds for which the pages count as read after a request."""


class Readers:
    """Knows when there was a request for readings."""

    def __init__(self) -> None:
        self.present: Feed[bool] = Feed(False)
        """Whether there was a request within two minutes."""
        self._first = 0.0
        """The first request after a pause, by `time.monotonic`."""
        self._last = 0.0

    def touch(self) -> None:
        """Says that there is a request now."""
        self._last = time.monotonic()
        if not self.present.value:
            self._first = self._last
            self.present.publish(True)

    def interval(self, wanted: float) -> float:
        """Seconds between two readings that a reader finds now; `wanted` once readings follow."""
        follow = self.present.value and time.monotonic() - self._first > wanted
        return wanted if follow else max(wanted, UNREAD_INTERVAL)

    async def run(self) -> None:
        """Publishes the end of each time of reading."""
        async for present in self.present.watch():
            if present:
                while (left := self._last + _REMEMBERED - time.monotonic()) > 0:  # noqa: ASYNC110
                    await asyncio.sleep(left)
                self.present.publish(False)
