"""Blocking questions that a thread asks again and again, and that wake the loop on a change only.

What is polled (a card, the config file) has the same answer for days: the event loop sleeps
meanwhile. Start reading at `until_changed`.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from npu_agent.threads import DaemonThread
from npu_agent.ticks import until_tick

T = TypeVar("T")

_CHECK = 1.0
"""Seconds between checks of the loop that the thread does not hang: at the moments of `until_tick`,
as everything else that is due each second."""
_EARLY = 0.1
"""Seconds that such a check may come too early for a question that was asked half a second ago."""

_LONG = 5.0
"""Seconds after which a question that was not asked shows that the thread does not run."""


@dataclass(slots=True, eq=False, kw_only=True)
class Repeat(Generic[T]):
    """A blocking question that is asked until its answer is another one."""

    ask: Callable[[], T]
    """Must not raise."""
    expected: T
    every: float
    """Seconds, as of `until_tick`."""
    due: float
    """When it is asked next, by `time.monotonic`."""
    began: float | None = None
    """Since when it waits for an answer; None: it does not."""

    @property
    def done(self) -> bool:
        """Whether the last answer has come."""
        return self.began is None

    def is_late(self, deadline: float) -> bool:
        began = self.began
        return began is not None and time.monotonic() - began > deadline - _EARLY

    def is_overdue(self) -> bool:
        """Whether it should have been asked long ago."""
        return self.done and time.monotonic() - self.due > _LONG

    def has_changed(self) -> bool:
        """Asks; blocking."""
        self.began = time.monotonic()
        changed = self.ask() != self.expected
        self.began = None
        self.due = time.monotonic() + until_tick(self.every)
        return changed


async def until_changed(
    thread: DaemonThread,
    repeats: Collection[Repeat[Any]],
    *,
    deadline: float,
    until: float,
    wake: Collection[asyncio.Event],
) -> Repeat[Any] | None:
    """Has `thread` ask each question when it is due, and returns one with another answer.

    Also one that has had no answer for `deadline` seconds, and so is not `done`: it keeps the
    thread, so that the caller needs another one. None: it is `until` by `time.monotonic`, or an
    event of `wake` is set. The thread is free soon after that, or after a cancellation.

    Raises:
        OSError: the system gives us no thread.
    """
    stop = threading.Event()
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Repeat[Any] | None] = loop.create_future()
    if repeats:
        answer = loop.run_in_executor(thread, _ask_each, repeats, stop)
    woken = [loop.create_task(event.wait()) for event in wake]
    waiting: list[asyncio.Future[Any]] = [answer, *woken]
    try:
        while (left := until - time.monotonic()) > 0:
            done, _ = await asyncio.wait(
                waiting,
                timeout=min(left, until_tick(_CHECK)),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answer in done:
                return answer.result()
            if done:
                break
            if late := next((repeat for repeat in repeats if repeat.is_late(deadline)), None):
                return late
            if repeats and all(repeat.is_overdue() for repeat in repeats):
                raise OSError(errno.EAGAIN, "the system does not let our thread begin")

        stop.set()
        if not all(repeat.done for repeat in repeats):
            await asyncio.wait([answer], timeout=deadline)
        return next((repeat for repeat in repeats if not repeat.done), None)
    finally:
        stop.set()
        for future in waiting:
            future.cancel()


def _ask_each(repeats: Collection[Repeat[Any]], stop: threading.Event) -> Repeat[Any] | None:
    while not stop.wait(max(0.0, min(repeat.due for repeat in repeats) - time.monotonic())):
        for repeat in repeats:
            if stop.is_set():
                return None
            if repeat.due <= time.monotonic() and repeat.has_changed():
                return repeat
    return None
