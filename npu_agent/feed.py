"""Feed: the latest value of something, for many readers.

The one way values travel between the parts of the agent. A reader that is slow skips values and
never queues them, so that no part can hold up another.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

T = TypeVar("T")


class Feed(Generic[T]):
    """Holds the latest value and lets any number of readers wait for the next one.

    Belongs to one event loop: `publish` and `close` are called from its thread.
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def value(self) -> T:
        """The latest value."""
        return self._value

    @property
    def changed(self) -> asyncio.Event:
        """Set once the value of now is no longer the latest; each value has an event of its own."""
        return self._changed

    def publish(self, value: T) -> bool:
        """Makes `value` the latest one. An equal value changes nothing; returns whether it did."""
        if value == self._value:
            return False
        self._value = value
        self._wake()
        return True

    def close(self) -> None:
        """Ends every `watch`, now and later. The value stays readable."""
        self._closed = True
        self._wake()

    async def watch(self) -> AsyncIterator[T]:
        """Yields the value of now, then each newer one; ends when the feed is closed."""
        nothing = object()
        seen: object = nothing
        while not self._closed:
            # Taken before the value is read: a publish during the reader's work sets this very
            # event, so that the wait below returns at once and nothing is missed.
            changed = self._changed
            if self._value is not seen:
                seen = self._value
                yield self._value
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def changes_of(*feeds: Feed[Any]) -> AsyncIterator[None]:
    """Yields at the start, and again after any of `feeds` has changed; never ends by itself.

    The reader looks at the feeds' values: changes that come while it is at work are one change.
    """
    while True:
        changed = [feed.changed for feed in feeds]
        yield
        waiting = [asyncio.create_task(event.wait()) for event in changed]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
