"""Feed: the latest value of something, for many readers.

The one way values travel between the parts of the agent. A slow reader skips values instead of
queueing them, so that no part can delay another. A part that needs something computed from a
value, or one piece of it, gets a derived feed: `Feed.map`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


class ClosedError(Exception):
    """A feed was closed before it had the value that a reader waited for."""


class Feed(Generic[T]):
    """Holds the latest value and lets any number of readers wait for the next one.

    Belongs to one event loop: `publish` and `close` are called from its thread.
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._changed = asyncio.Event()
        self._closed = False
        self._derived: list[Callable[[], None]] = []
        """Each brings one derived feed up to date, or sets the event of a reader of several."""

    @property
    def value(self) -> T:
        return self._value

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def changed(self) -> asyncio.Event:
        """Set when the present value is replaced; each value has an event of its own."""
        return self._changed

    def publish(self, value: T) -> bool:
        """Makes `value` the latest one. Returns whether it changed; an equal one does not count."""
        if value is self._value or value == self._value:
            return False
        self._value = value
        self._update()
        return True

    def close(self) -> None:
        """Ends every `watch`, now and later, of derived feeds too. The value stays readable."""
        self._closed = True
        self._update()

    def map(self, function: Callable[[T], U]) -> Feed[U]:
        """A feed of `function` of this feed's value, which changes only when the result does.

        The result is computed within `publish`, before any reader runs: a reader of both feeds
        finds values that belong together, and is not woken for an equal result. `function` must
        be pure and quick, and must not raise. A derived feed lives as long as this one: derive
        where the parts are put together. Nothing else publishes to it.
        """
        derived: Feed[U] = Feed(function(self._value))

        def update() -> None:
            derived.publish(function(self._value))
            if self._closed:
                derived.close()

        self._derived.append(update)
        if self._closed:
            derived.close()
        return derived

    def map_with(self, other: Feed[U], function: Callable[[T, U], V]) -> Feed[V]:
        """As `map`, of two feeds; closed with this one."""
        derived = self.map(lambda value: function(value, other.value))

        def update() -> None:
            derived.publish(function(self._value, other.value))

        other._derived.append(update)
        return derived

    async def watch(self) -> AsyncIterator[T]:
        """Yields the present value, then each newer one; ends when the feed is closed."""
        nothing = object()
        seen: object = nothing
        while not self._closed:
            # Taken before the value is read: a publish during the reader's work sets this very
            # event, so that the wait below returns immediately and nothing is missed.
            changed = self._changed
            if self._value is not seen:
                seen = self._value
                yield self._value
            else:
                await changed.wait()

    async def until(self, met: Callable[[T], object]) -> T:
        """The first value that meets the condition, the present one or a newer one.

        Raises:
            ClosedError: the feed is closed.
        """
        while not self._closed:
            if met(self._value):
                return self._value
            await self._changed.wait()
        raise ClosedError

    def _update(self) -> None:
        for update in self._derived:
            update()
        self._changed.set()
        self._changed = asyncio.Event()


async def changes_of(*feeds: Feed[Any]) -> AsyncGenerator[None, None]:
    """Yields at the start, and again after any of `feeds` has changed; never ends by itself.

    The reader reads the feeds' values: changes that come while it is busy count as one change.
    """
    changed = asyncio.Event()
    for feed in feeds:
        feed._derived.append(changed.set)  # noqa: SLF001 (its own module)
    try:
        while True:
            changed.clear()
            yield
            await changed.wait()
    finally:
        for feed in feeds:
            feed._derived.remove(changed.set)  # noqa: SLF001
