"""A daemon thread that does one thing's blocking reads, with a deadline on each.

Why not an executor: a read that hangs in the kernel would take one of asyncio's few shared threads
for good, and the interpreter waits for executor threads at exit. A daemon thread is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


_AT_ONCE = 0.003
"""Seconds. Nearly every read is back by then. The loop looks after this time rather than being
woken by each thread: with many cards that are looked at together, that halves what an idle agent
costs."""


class HungError(Exception):
    """A read that has not come back by its deadline.

    The message stays the same for as long as it hangs: it is shown, and what is shown is compared.
    """


class Reader:
    """Runs blocking functions on a thread of its own, one call at a time.

    While one hangs, further calls fail at once; when it comes back, the reader works again. Made
    for one owner: a call beside one that is under way is taken for one after a hang.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's, seen in stack dumps."""
        self._jobs: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._busy = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def hangs(self) -> bool:
        """Whether a call has not come back: the next one would fail at once."""
        return self._busy

    async def call(self, function: Callable[[], T], *, deadline: float) -> T:
        """Returns what `function` returns, or raises what it raises.

        Raises:
            HungError: it has not come back within `deadline` seconds, or an earlier call has not
                come back yet.
        """
        if self._busy:
            raise HungError(f"no answer within {deadline:g} s")
        call = _Call(function, asyncio.get_running_loop())
        self._busy = True
        self._jobs.put(call)
        await asyncio.sleep(min(_AT_ONCE, deadline))
        came = call.wait()
        if came is not None:
            try:
                async with asyncio.timeout(max(0.0, deadline - _AT_ONCE)):
                    await came.wait()
            except TimeoutError:
                raise HungError(f"no answer within {deadline:g} s") from None
        if call.error is not None:
            raise call.error
        return cast("T", call.value)

    def close(self) -> None:
        """Ends the thread when it is free; one that hangs is left behind as a daemon."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (call := self._jobs.get()) is not None:
            call.run()
            self._busy = False
            call.tell()


class _Call(Generic[T]):
    """A function on its way through a thread. `value` or `error` is there once it has come back."""

    def __init__(self, function: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None
        self._function = function
        self._loop = loop
        self._lock = threading.Lock()
        self._back = False
        self._came: asyncio.Event | None = None

    def run(self) -> None:
        """On the thread: does it."""
        try:
            self.value = self._function()
        except BaseException as raised:  # the caller's to handle
            self.error = raised

    def tell(self) -> None:
        """On the thread: says that it has come back, and wakes the loop if that waits for it."""
        with self._lock:
            self._back = True
        if self._came is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                self._loop.call_soon_threadsafe(self._came.set)

    def wait(self) -> asyncio.Event | None:
        """On the loop: None if it has come back, else what will be set when it does."""
        with self._lock:
            if not self._back:
                self._came = asyncio.Event()
            return self._came
