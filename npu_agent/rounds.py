"""Blocking tasks, each done again and again at its times, of which none waits for one that hangs.

Two threads take turns: one makes a round, which is to do whatever is due, one task after the other,
and the other one makes the next round. So each of them looks after the one before it. Where a task
hangs, the other thread makes the rounds alone, with a new one; the thread that hangs ends when its
task comes back. A fault of our own ends neither: it is logged, and the rounds go on. Where a thread
has ended nevertheless, the other one replaces it.

Not a thread for each task, as threads that wake up together only get into each other's way, and no
third one that watches, as to wake up is most of what it costs.

Daemon threads, because a read that hangs in the kernel cannot be ended, and the interpreter waits
at its exit for every other kind of thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from npu_agent.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logger(__name__)

T = TypeVar("T")

READ_DEADLINE = 0.5
"""Seconds that a driver may take to answer. With the default health settings, a card that hangs is
fenced within 1.5 s of its last good answer."""
_PATIENCE = 0.1
"""Seconds that a task may take while others wait, once the other thread has checked."""
_CHECK_AFTER = 0.5
"""Seconds after a round began until the other thread checks that it has come to its end: where
rounds are half a second apart, the moment when the other one has to make the next."""
_LONGEST_REST = 60.0
"""Seconds, also where nothing is ever due: a lock waits for some centuries at most."""
_AFTER_A_FAULT = 1.0
"""Seconds until what failed unexpectedly is tried again."""
_SAME = 0.01
"""Seconds between two moments that are as good as one."""


def no_answer() -> str:
    """The reason while a read hangs: always the same, as it is shown, and compared."""
    return f"no answer within {READ_DEADLINE:g} s"


class Task:
    """Something to do on a thread, with a stamp of when it asked a driver last.

    What several threads write is guarded by `lock`, for moments only: never while a driver is
    asked.
    """

    def __init__(self, name: str, changed: Callable[[], None]) -> None:
        """`name` is that of its thread if it hangs, seen in stack dumps.

        `changed` is called on any thread after a round in which it had something to `report`; once
        for all tasks that have the same.
        """
        self.name = name
        self.changed = changed
        self.lock = threading.RLock()
        self.due = 0.0
        """When to do it next, by `time.monotonic`."""
        self.busy = False
        """Whether it is under way; only `Rounds` sets this."""
        self.news = False
        """Whether `changed` is to be called."""
        self._asked_at = 0.0
        self._waited = 0.0
        """Seconds for which it was due while another one hung."""
        self._missed = 0

    def do(self) -> None:
        """Does it, and sets `due`; must not raise. On one thread at a time, not always the same."""
        raise NotImplementedError

    def check(self) -> float | None:
        """Called while it is busy: takes note of deadlines missed; returns when to call again."""
        raise NotImplementedError

    def hurry(self) -> None:
        """It is due now."""
        with self.lock:
            self.due = time.monotonic()

    def report(self) -> None:
        """There is something new."""
        self.news = True

    def begins(self, waited: float = 0.0) -> None:
        """It is under way from now on, after it waited so many seconds for one that hangs."""
        with self.lock:
            self._waited = waited
        self.asks()

    def asks(self) -> None:
        """A read from a driver begins."""
        with self.lock:
            self._asked_at, self._missed = time.monotonic(), 0

    def missed(self, interval: float) -> tuple[int, float]:
        """How many deadlines passed since the last call, and when the next one does.

        To be called under `lock`. After `READ_DEADLINE` a read has missed one, and one more for
        each `interval` since it should have begun: as many as probes that fail. So what had to wait
        for another one that hangs, as a whole driver does, is found as soon as that one. The time
        is of `time.monotonic`.
        """
        first = self._asked_at + READ_DEADLINE
        late, before = time.monotonic() - first, self._missed
        if late >= 0:  # with a longer interval it is fewer, and none of those counted is taken back
            self._missed = max(before, int((late + self._waited) / interval) + 1)
        return self._missed - before, first + max(0.0, self._missed * interval - self._waited)


def next_moment(interval: float) -> float:
    """The next moment to do what is done each `interval`: the same one for all tasks."""
    now = time.monotonic()
    return now + interval - now % interval


class Rounds:
    """Does tasks, for as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: tuple[Task, ...] = ()
        self._of: dict[object, tuple[Task, ...]] = {}
        """The tasks of each that has some."""
        self._hands: list[_Hand] = []
        """The threads that take turns: two, but for moments."""

    def follow(self, owner: object, tasks: tuple[Task, ...]) -> None:
        """Does these of `owner`'s from now on, and no others of its own.

        One that is left out while it hangs is not done again.

        Raises:
            RuntimeError: the system gives us no more threads.
        """
        with self._lock:
            self._of[owner] = tasks
            if not tasks:
                del self._of[owner]
            self._tasks = tuple(task for each in self._of.values() for task in each)
        if tasks:
            self._complete()
        self.wake()

    @contextlib.contextmanager
    def polling(
        self, name: str, poll: Callable[[], T], every: float, found: Callable[[T], object]
    ) -> Iterator[None]:
        """Calls `poll` every so many seconds while the context is open, on a thread.

        `found` is called on the event loop with what it returned first, and whenever it returned
        something else than the time before. As long as it hangs, nothing is found.
        """
        task = _Poll(name, poll, every, found, asyncio.get_running_loop())
        try:
            self.follow(task, (task,))
            yield
        finally:
            self.follow(task, ())

    def wake(self) -> None:
        """Reads again when tasks are due."""
        for hand in list(self._hands):
            hand.pause.end()

    def _complete(self) -> None:
        """Has two threads take turns, if the system has them: one can do it alone.

        Raises:
            RuntimeError: it has not even one.
        """
        with self._lock:
            ended = [hand for hand in self._hands if not hand.thread.is_alive()]
            for hand in ended:
                self._hands.remove(hand)
            while self._tasks and len(self._hands) < 2:
                hand = _Hand(self._take_turns)
                try:
                    hand.thread.start()
                except RuntimeError:
                    if not self._hands:
                        raise
                    break  # the next round tries again
                self._hands.append(hand)
        if ended:
            log.error("a thread that probes the cards has ended: another one takes its place")

    # On the threads that take turns.

    def _take_turns(self, me: _Hand) -> None:
        while self._goes_on(me):
            try:
                self._turn(me)
            except Exception:
                # A fault of our own is logged, and ends no thread: nobody would notice.
                log.exception("the rounds of the cards failed, and go on")
                me.pause.until(time.monotonic() + _AFTER_A_FAULT)

    def _goes_on(self, me: _Hand) -> bool:
        """Whether this is one of the threads that take turns; none is if there is nothing to do."""
        with self._lock:
            if not self._tasks and me in self._hands:
                self._hands.remove(me)
            return me in self._hands

    def _turn(self, me: _Hand) -> None:
        """Makes a round, unless the other thread is amid one; then rests."""
        self._complete()
        since, wait = self._enter(me)
        if since is not None:
            # If this thread itself woke up late, nobody ran meanwhile: the process was stopped.
            self._share_out(since, min(time.monotonic(), me.wakes))
            self._complete()
        elif wait is None and not self._round(me):
            return
        me.amid = False
        dues = [due for task in self._tasks if task.busy and (due := task.check())]
        self._tell()
        me.pause.until(min([self._plan(me, wait), *dues]))

    def _enter(self, me: _Hand) -> tuple[float | None, float | None]:
        """Since when the other thread hangs, if it does: then it takes no turns any more.

        And where it is amid a round, but not for long with one task, when to check again. Never are
        both amid one: both might hang.
        """
        with self._lock:
            now = time.monotonic()
            for other in self._hands:
                if other is not me and other.amid:
                    task, since = other.doing or (None, now)
                    if task is None or now < since + _PATIENCE:
                        return None, since + _PATIENCE
                    other.thread.name = task.name
                    self._hands.remove(other)
                    return since, None
            me.amid = True
            return None, None

    def _round(self, me: _Hand) -> bool:
        """Does what is due; returns whether this thread still takes turns.

        Ends early where there are other tasks meanwhile: a thread may have hung for long.
        """
        tasks = self._tasks
        return all(
            self._done(task, me)
            for task in tasks
            if self._tasks is tasks and task.due <= time.monotonic() and self._begin(task, me)
        )

    def _plan(self, me: _Hand, wait: float | None) -> float:
        """When to wake up: for the next round, or to check it if the other thread makes it."""
        with self._lock:
            if wait is None:
                due = min((task.due for task in self._tasks if not task.busy), default=math.inf)
                due = min(due, time.monotonic() + _LONGEST_REST)
                mine = all(one.wakes > due + _SAME for one in self._hands if one is not me)
                wait = due if mine else due + _CHECK_AFTER
            me.wakes = wait
            return wait

    def _begin(self, task: Task, me: _Hand | None, waited: float = 0.0) -> bool:
        with self._lock:
            if task.busy:
                return False
            task.begins(waited)
            task.busy = True
            if me:
                me.doing = task, time.monotonic()
            return True

    def _done(self, task: Task, me: _Hand | None) -> bool:
        """Does a task that has begun; returns whether this thread still takes turns."""
        try:
            task.do()
        except Exception:
            with task.lock:
                task.due = time.monotonic() + _AFTER_A_FAULT
            log.exception("a task of the rounds failed", task=task.name)
        finally:
            stays = self._finish(task, me)
        return stays

    def _finish(self, task: Task, me: _Hand | None) -> bool:
        with self._lock:
            task.busy = False
            if me in self._hands:
                me.doing = None
                return True
        self._tell()
        self.wake()  # it may be due again
        return False

    def _share_out(self, since: float, until: float) -> None:
        """Has each task that has waited done on a thread of its own: where one hangs, more may.

        One after the other, each of these would keep the others waiting again. They waited for one
        that hung from `since` to `until`.
        """
        for task in self._tasks:
            if task.due <= time.monotonic():
                waited = max(0.0, until - max(since, task.due)) if task.due else 0.0
                with suppress(RuntimeError):  # no more threads: it is done in the next round
                    threading.Thread(
                        target=self._do_alone, args=(task, waited), name=task.name, daemon=True
                    ).start()

    def _do_alone(self, task: Task, waited: float) -> None:
        if self._begin(task, None, waited):
            self._done(task, None)

    def _tell(self) -> None:
        news = [task for task in self._tasks if task.news]
        for task in news:
            task.news = False
        try:
            for changed in {task.changed for task in news}:
                changed()
        except Exception:
            for task in news:
                task.news = True  # it may not have been passed on
            raise


class _Hand:
    """One of the threads that take turns."""

    def __init__(self, work: Callable[[_Hand], None]) -> None:
        self.thread = threading.Thread(target=work, args=(self,), name="npu-probes", daemon=True)
        self.pause = _Pause()
        self.amid = False
        """Whether it is amid a round."""
        self.doing: tuple[Task, float] | None = None
        """What it does now, and since when."""
        self.wakes = 0.0
        """When it means to wake up, or has, by `time.monotonic`."""


class _Poll(Task, Generic[T]):
    """See `Rounds.polling`."""

    def __init__(
        self,
        name: str,
        poll: Callable[[], T],
        every: float,
        found: Callable[[T], object],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(name, self._pass_on)
        self._poll = poll
        self._every = every
        self._found = found
        self._loop = loop
        self._last: list[T] = []

    def do(self) -> None:
        """Polls."""
        found = [self._poll()]
        if found != self._last:
            self._last = found
            self.report()
        self.due = next_moment(self._every)

    def check(self) -> None:
        """Nothing depends on when it comes back."""

    def _pass_on(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: the agent has ended
            self._loop.call_soon_threadsafe(partial(self._found, self._last[0]))


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
