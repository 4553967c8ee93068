"""Blocking tasks, each done again and again at its times, of which none waits for one that hangs.

One thread makes the rounds: it does whatever is due, one task after the other, as threads that wake
up together only get into each other's way. A second one watches it, and makes the rounds in its
place when a task hangs; the thread that hangs ends when its task comes back. A fault of our own
ends neither: it is logged, and the rounds go on. Where a thread has ended nevertheless, the other
one replaces it.

Daemon threads, because a read that hangs in the kernel cannot be ended, and the interpreter waits
at its exit for every other kind of thread.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from npu_agent.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable

log = logger(__name__)

READ_DEADLINE = 0.5
"""Seconds that a driver may take to answer. With the default health settings, a card that hangs is
fenced within 1.5 s of its last good answer."""
_PATIENCE = 0.1
"""Seconds after which the other tasks no longer wait for the one under way."""
_LONGEST_REST = 60.0
"""Seconds, also where nothing is ever due: a lock waits for some centuries at most."""
_AFTER_A_FAULT = 1.0
"""Seconds until what failed unexpectedly is tried again."""


def no_answer() -> str:
    """The reason while a read hangs: always the same, as it is shown, and compared."""
    return f"no answer within {READ_DEADLINE:g} s"


class Task:
    """Something to do on a thread, with a stamp of when it asked a driver last.

    What several threads write is guarded by `lock`, for moments only: never while a driver is
    asked.
    """

    def __init__(self, name: str) -> None:
        """`name` is that of its thread if it hangs, seen in stack dumps."""
        self.name = name
        self.lock = threading.Lock()
        self.due = 0.0
        """When to do it next, by `time.monotonic`."""
        self.busy = False
        """Whether it is under way; only `Rounds` sets this."""
        self.report: Callable[[], None] = lambda: None
        """To be called, on any thread, when there is something new."""
        self._asked_at = 0.0
        self._missed = 0

    def do(self) -> None:
        """Does it, and sets `due`; must not raise. On one thread at a time, not always the same."""
        raise NotImplementedError

    def check(self) -> float | None:
        """Called while it is busy: takes note of deadlines missed; returns when to call again."""
        raise NotImplementedError

    def asks(self) -> None:
        """A read from a driver begins."""
        with self.lock:
            self._asked_at, self._missed = time.monotonic(), 0

    def missed(self, interval: float) -> tuple[int, float]:
        """How many deadlines passed since the last call, and when the next one does.

        To be called under `lock`. After `READ_DEADLINE` a read has missed one, and one more after
        each `interval`: as many as probes that fail. The time is of `time.monotonic`.
        """
        first = self._asked_at + READ_DEADLINE
        late = time.monotonic() - first
        before, self._missed = self._missed, 0 if late < 0 else int(late / interval) + 1
        return self._missed - before, first + self._missed * interval


def next_moment(interval: float) -> float:
    """The next moment to do what is done each `interval`: the same one for all tasks."""
    now = time.monotonic()
    return now + interval - now % interval


class Rounds:
    """Does the tasks in `tasks`, until its `end`."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called on any thread after tasks had something to report: once a round."""
        self._changed = changed
        self._lock = threading.Lock()
        self._tasks: tuple[Task, ...] = ()
        self._maker: threading.Thread | None = None
        """The thread that makes the rounds; None before `start`."""
        self._watcher: threading.Thread | None = None
        self._doing: tuple[Task, float] | None = None
        """What the maker does now, and since when."""
        self._news = False
        self._making, self._watching = _Pause(), _Pause()
        self._ended = False

    def start(self) -> None:
        """Starts the thread that makes the rounds, which then starts the one that watches it.

        Raises:
            RuntimeError: the system gives us no more threads.
        """
        self._maker = threading.Thread(target=self._make, name="npu-probes", daemon=True)
        self._maker.start()

    def end(self) -> None:
        """Ends the threads, each when it is free."""
        self._ended = True
        self.wake()

    def follow(self, tasks: tuple[Task, ...]) -> None:
        """Does these from now on; one that is left out while it hangs is not done again."""
        for task in tasks:
            task.report = self._report
        self._tasks = tasks
        self.wake()

    def wake(self) -> None:
        """Reads again when tasks are due."""
        self._making.end()
        self._watching.end()

    def _report(self) -> None:
        self._news = True

    def _tell(self) -> None:
        if self._news:
            self._news = False
            self._changed()

    def _steadily(self, step: Callable[[], None], pause: _Pause) -> None:
        """Makes a step. A fault of our own is logged, and ends no thread: nobody would notice."""
        try:
            step()
        except Exception:
            log.exception("the rounds of the cards failed, and go on")
            self._news = True  # it may not have been passed on
            pause.until(time.monotonic() + _AFTER_A_FAULT)

    # On the thread that makes the rounds.

    def _make(self) -> None:
        while not self._ended and threading.current_thread() is self._maker:
            self._steadily(self._round, self._making)

    def _round(self) -> None:
        if self._watcher is None or not self._watcher.is_alive():
            self._start_watcher()
        for task in self._tasks:
            if task.due <= time.monotonic() and self._begin(task) and not self._done(task):
                return
        self._tell()
        dues = [task.due for task in self._tasks if not task.busy]
        self._making.until(min(dues, default=time.monotonic() + 1))

    def _start_watcher(self) -> None:
        watcher = threading.Thread(target=self._watch, name="npu-watchdog", daemon=True)
        with suppress(RuntimeError):  # no more threads: the next round tries again
            watcher.start()
            self._watcher = watcher

    def _begin(self, task: Task) -> bool:
        with self._lock:
            if task.busy:
                return False
            task.asks()
            task.busy, self._doing = True, (task, time.monotonic())
            return True

    def _done(self, task: Task) -> bool:
        """Does a task that has begun; returns whether this thread still makes the rounds."""
        try:
            task.do()
        except Exception:
            with task.lock:
                task.due = time.monotonic() + _AFTER_A_FAULT
            log.exception("a task of the rounds failed", task=task.name)
        finally:
            makes = self._finish(task)
        return makes

    def _finish(self, task: Task) -> bool:
        """Returns whether this thread still makes the rounds."""
        with self._lock:
            task.busy = False
            if threading.current_thread() is self._maker:
                self._doing = None
                return True
        self._tell()
        self.wake()  # it may be due again
        return False

    # On the thread that watches it.

    def _watch(self) -> None:
        while not self._ended and threading.current_thread() is not self._maker:
            self._steadily(self._look, self._watching)
        if threading.current_thread() is self._maker:
            self._steadily(self._share_out, self._making)
            self._make()

    def _look(self) -> None:
        dues = [due for task in self._tasks if task.busy and (due := task.check())]
        self._tell()
        with self._lock:
            now = time.monotonic()
            if ended := self._maker_ended():
                self._take_over(None)
            elif self._doing is None:
                free = (task.due for task in self._tasks if not task.busy)
                dues.append(min(free, default=now + 1) + _PATIENCE)
            elif now < (until := self._doing[1] + _PATIENCE):
                dues.append(until)
            else:
                self._take_over(self._doing[0])
                return
        if ended:
            log.error("the thread that probes the cards has ended: another one takes its place")
        else:
            self._watching.until(min(dues))

    def _maker_ended(self) -> bool:
        """Whether nobody makes the rounds, although they have not been ended."""
        alive = self._maker is not None and self._maker.is_alive()
        return not alive and not self._ended

    def _take_over(self, hangs: Task | None) -> None:
        """Becomes the thread that makes the rounds, under the lock."""
        if self._maker and hangs:
            self._maker.name = hangs.name
        self._maker, self._watcher, self._doing = threading.current_thread(), None, None
        self._maker.name = "npu-probes"

    def _share_out(self) -> None:
        """Has each task that has waited done on a thread of its own: where one hangs, more may.

        One after the other, each of these would keep the others waiting again.
        """
        for task in self._tasks:
            if task.due <= time.monotonic():
                with suppress(RuntimeError):  # no more threads: it is done in the round
                    threading.Thread(
                        target=self._do_alone, args=(task,), name=task.name, daemon=True
                    ).start()

    def _do_alone(self, task: Task) -> None:
        with self._lock:
            if task.busy:
                return
            task.asks()
            task.busy = True
        self._done(task)


class _Pause:
    """A pause that another thread can end: a lock is the cheapest of all waits with a timeout."""

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._held.acquire()

    def until(self, moment: float) -> None:
        """Rests until then, by `time.monotonic`, or until `end`, even if that came before.

        For `_LONGEST_REST` at most.
        """
        rest = min(moment - time.monotonic(), _LONGEST_REST)
        self._held.acquire(timeout=max(0.0, rest))

    def end(self) -> None:
        """Ends the pause under way, or else the next one."""
        with suppress(RuntimeError):  # it has been ended already
            self._held.release()
