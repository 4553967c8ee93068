"""A daemon thread for blocking calls of the event loop, with a deadline on each.

Why not an executor: a call that hangs in the kernel would take one of asyncio's few shared threads
for good, and the interpreter waits for executor threads at exit. A daemon thread is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class HungError(Exception):
    """A call that has not come back by its deadline.

    The message stays the same for as long as it hangs: it is shown, and what is shown is compared.
    """


class Reader:
    """Runs blocking functions on a thread of its own, one call at a time.

    While one hangs, further calls fail immediately; when it comes back, the reader works again.
    Made for one owner: a call beside one that is under way is taken for one after a hang.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's, seen in stack dumps."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def hangs(self) -> bool:
        """Whether a call has not come back: the next one would fail immediately."""
        return self._busy

    async def call(self, function: Callable[[], T], *, deadline: float) -> T:
        """Returns what `function` returns, or raises what it raises.

        Raises:
            HungError: it has not come back within `deadline` seconds, or an earlier call has not
                come back yet.
        """
        if self._busy:
            raise HungError(f"no answer within {deadline:g} s")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if answer.done():  # cancelled, or too late
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]

        def job() -> None:
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:  # the caller's to handle
                error = raised
            self._busy = False
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(settle, value, error)

        self._busy = True
        self._jobs.put(job)
        try:
            await asyncio.wait([answer], timeout=deadline)
            if not answer.done():
                raise HungError(f"no answer within {deadline:g} s")
            return answer.result()
        finally:
            answer.cancel()

    def close(self) -> None:
        """Ends the thread when it is free; one that hangs is left behind as a daemon."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
