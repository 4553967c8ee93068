"""Ends the agent on SIGTERM or SIGINT, also where the event loop hangs.

Python runs signal handlers on the main thread, between two of its instructions. A main thread that
hangs in a system call (a file system that does not answer) runs none. So a thread waits for the
signals: it asks the event loop to end everything in order, and ends the process after `LONGEST`.
A read that hangs uninterruptibly in the kernel delays even that.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NoReturn

from npu_agent.logs import logger

log = logger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)

LONGEST = 2.0
"""Seconds for an ordered end; one where nothing hangs takes 0.2."""
_LAST_WORDS = 0.2
"""Seconds for the log to take them: the log may be what hangs."""


class Shutdown:
    """Handles SIGTERM and SIGINT; to be made on the main thread, before any other thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Callable[[signal.Signals], None] = lambda _: None
        self._until = 0.0
        """When the process is ended, by `time.monotonic`."""
        for number in SIGNALS:
            # The first process of a container gets no signal for which it has no handler.
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # also of the threads to come
        threading.Thread(target=self._wait, name="npu-signals", daemon=True).start()

    def begin(self, end: Callable[[signal.Signals], None]) -> None:
        """Makes the running event loop call `end` at the first signal; before, the process ends."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._end = end

    def allow(self, seconds: float) -> None:
        """Ends the process so many seconds from now at the latest; called after `end`."""
        self._until = time.monotonic() + seconds

    def _wait(self) -> None:
        received = signal.Signals(signal.sigwait(SIGNALS))
        with self._lock:
            loop = self._loop
            end = self._end
        if loop is None:  # nothing has begun that would have to be ended
            os._exit(0 if received is signal.SIGTERM else 128 + received)
        self.allow(LONGEST)
        with suppress(RuntimeError):  # the loop is closed: the agent has ended by itself
            loop.call_soon_threadsafe(end, received)
        while (left := self._until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))  # `allow` may have shortened it
        _force_exit()


def _force_exit() -> NoReturn:
    try:
        # Not threading.Thread, whose start never returns where there is no memory.
        _thread.start_new_thread(_say_where, (said := threading.Event(),))
        said.wait(_LAST_WORDS)
    finally:  # without words if there is no thread, or no memory
        os._exit(1)


def _say_where(said: threading.Event) -> None:
    at = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (documented)
    where = " < ".join(
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in islice(traceback.walk_stack(at), 6)
    )
    log.error("exited without waiting for a hung task", at=where)
    said.set()
