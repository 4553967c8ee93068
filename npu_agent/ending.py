"""The end of the agent by a signal, also where the event loop hangs.

Python runs the handlers of signals on the main thread, between two of its steps. One that hangs in
a call of the system (a file system that does not answer, a log that nobody reads) takes none, and
would have to be killed. So a thread of its own takes the signals that end the agent; it has the
event loop end everything in order, and ends the process itself where that makes no progress.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from npu_agent.logs import logger

log = logger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_TURN = 0.05
"""Seconds."""
_PATIENCE = 14
"""Turns in a row without an answer of the loop, while its thread sleeps, after which it hangs. One
that has work to do, on a machine that is busy, does not sleep."""
_LONGEST = 4.0
"""Seconds that an end may take in all: each part has its deadline, and all have less than 1 s."""
_LAST_WORDS = 0.2
"""Seconds for the log to take them: it may be what hangs."""
_HUNG = 1
"""Exit code."""


class Ending:
    """Takes SIGTERM and SIGINT from now on; to be made on the main thread, before any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Callable[[signal.Signals], None] = lambda _: None
        for number in SIGNALS:
            # The first process of a container gets no signal for which it has no handler.
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # also of the threads to come
        threading.Thread(target=self._wait, name="npu-signals", daemon=True).start()

    def begin(self, end: Callable[[signal.Signals], None]) -> None:
        """Has the running event loop call `end` at the first signal; before, the process ends."""
        with self._lock:
            self._loop, self._end = asyncio.get_running_loop(), end

    def _wait(self) -> None:
        received = signal.Signals(signal.sigwait(SIGNALS))
        with self._lock:
            loop, end = self._loop, self._end
        if loop is None:  # nothing has been begun that would have to be ended
            os._exit(0 if received is signal.SIGTERM else 128 + received)
        until = time.monotonic() + _LONGEST
        with suppress(RuntimeError):  # the loop is closed: the agent has ended by itself
            loop.call_soon_threadsafe(end, received)
            while _answers(loop, until):
                time.sleep(_TURN)
        while time.monotonic() < until:  # the interpreter ends
            time.sleep(_TURN)
        _give_up()


def _answers(loop: asyncio.AbstractEventLoop, until: float) -> bool:
    """Whether the loop answers; False after `until` (`time.monotonic`).

    Raises:
        RuntimeError: it is closed.
    """
    answered, silent = threading.Event(), 0
    loop.call_soon_threadsafe(answered.set)
    while not answered.wait(_TURN):
        silent = silent + 1 if _main_sleeps() else 0
        if silent == _PATIENCE:
            _give_up()
        if time.monotonic() >= until:
            return False
    return time.monotonic() < until


def _main_sleeps() -> bool:
    """Whether the main thread waits for something other than its turn on a CPU.

    The third field of its ``stat``, after a name in parentheses: proc(5).
    """
    stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] != "R"


def _give_up() -> NoReturn:
    at = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (documented)
    where = " < ".join(
        f"{Path(each.filename).name}:{each.lineno}"
        for each in reversed(traceback.extract_stack(at)[-6:])
    )
    last = threading.Thread(
        target=lambda: log.error("ended without waiting for something that hangs", at=where),
        daemon=True,
    )
    with suppress(RuntimeError):  # no more threads
        last.start()
        last.join(_LAST_WORDS)
    os._exit(_HUNG)
