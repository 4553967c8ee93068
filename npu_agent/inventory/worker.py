"""A daemon thread that reads from drivers, and how the event loop knows that it hangs.

A daemon thread, because a read that hangs in the kernel cannot be ended, and the interpreter waits
at its exit for every other kind of thread.
"""

from __future__ import annotations

import threading
import time

READ_DEADLINE = 0.5
"""Seconds that a driver may take to answer. With the default health settings, a card that hangs is
fenced within 1.5 s of its last good answer."""


def no_answer() -> str:
    """The reason while a read hangs: always the same, as it is shown, and compared."""
    return f"no answer within {READ_DEADLINE:g} s"


class Worker:
    """A thread that works through `_run`, with a stamp of when it asked a driver last.

    What both threads write is guarded by `lock`, for moments only: never while a driver is asked.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's, seen in stack dumps."""
        self.lock = threading.Lock()
        self._asked_at: float | None = None
        self._missed = 0
        self._pausing = threading.Lock()
        """Held unless a pause is to end early: the cheapest of all waits with a timeout."""
        self._pausing.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread; from now on it counts as asking.

        Raises:
            RuntimeError: the system gives us no more threads.
        """
        self._asks()
        self._thread.start()

    def wake(self) -> None:
        """Ends the pause under way, or else the next one."""
        with self.lock:
            if self._pausing.locked():
                self._pausing.release()

    def missed(self, interval: float) -> tuple[int, float | None]:
        """How many deadlines passed since the last call, and when the next one does.

        To be called under `lock`. After `READ_DEADLINE` a read has missed one, and one more after
        each `interval`: as many as probes that fail. The time is of `time.monotonic`; None: no
        driver is asked.
        """
        if self._asked_at is None:
            return 0, None
        first = self._asked_at + READ_DEADLINE
        late = time.monotonic() - first
        before, self._missed = self._missed, 0 if late < 0 else int(late / interval) + 1
        return self._missed - before, first + self._missed * interval

    def _run(self) -> None:
        raise NotImplementedError

    def _left(self, interval: float) -> float:
        """Seconds until the next moment to probe, which is the same for all workers.

        So what they find becomes one Snapshot, and an idle machine wakes up once for all of them.
        """
        return interval - time.monotonic() % interval

    def _asks(self) -> None:
        """A read from a driver begins."""
        with self.lock:
            self._asked_at, self._missed = time.monotonic(), 0

    def _pause(self, seconds: float) -> None:
        """Rests for so long, or until `wake`."""
        with self.lock:
            self._asked_at = None
        self._pausing.acquire(timeout=max(0.0, seconds))


def said(error: BaseException) -> str:
    """An error of reading, for people: what failed, without Python's errno prefix."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
