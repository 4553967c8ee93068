"""Runs the blocking reads of a driver on one worker thread, each with a deadline.

Start reading at `Prober.run`. The event loop hands over a batch of jobs and gets back their
results. A job that misses its deadline keeps its thread, and no more than that one: the jobs after
it run on threads of their own, and the next batch gets a new worker.

Daemon threads: a read that hangs in the kernel cannot be ended, and the interpreter waits at its
exit for every other kind of thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from npu_agent.logs import logger
from npu_agent.ticks import set_within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logger(__name__)

T = TypeVar("T")

READ_DEADLINE = 0.5  # seconds


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Generic[T]):
    """A blocking call. The thread that runs it writes `began`, `result` and then `done`."""

    name: str
    """Of its thread where it has one of its own, as seen in stack dumps."""
    call: Callable[[], T]
    expected: T | None = None
    """A result that the event loop does not have to be woken for."""
    began: float | None = None
    """Seconds of `time.monotonic`; None: no thread has begun it."""
    result: T | None = None
    done: bool = False

    def run(self) -> None:
        self.began = time.monotonic()
        self.result = self.call()
        self.done = True


class Prober:
    """Runs batches of jobs, one batch at a time."""

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline or READ_DEADLINE
        self._worker: _Worker | None = None
        self._limited = False

    @property
    def late(self) -> str:
        """The reason while a read hangs: always the same, because it is shown and compared."""
        return f"no answer within {self.deadline:g} s"

    async def run(self, jobs: Sequence[Job[Any]], pause: float | None = None) -> None:
        """Returns when each job is `done`, has missed its deadline, or found no thread.

        `pause` is the time in seconds for which results that are as expected may wait: so an idle
        agent wakes once for each batch, and not twice. None: they do not wait.
        """
        if self._worker is None:
            try:
                self._worker = _Worker()
            except RuntimeError as error:
                self._no_thread(error)
                return
        self._limited = False
        batch = _Batch(jobs, asyncio.get_running_loop(), awaited=pause is None)
        self._worker.batches.put(batch)
        await set_within(batch.progress, min(self.deadline, pause or self.deadline))
        batch.awaited = True
        while not batch.done:
            now = time.monotonic()
            if now >= batch.began + self.deadline and self._worker:
                # A job hangs, or many are slow. Those that wait must not wait for each other.
                self._leave_worker()
                try:
                    batch.share_out()
                except RuntimeError as error:
                    self._no_thread(error)
            ends = [
                (job.began or now) + self.deadline
                for job in jobs
                if not job.done and (job.began is not None or self._worker)
            ]
            if not any(end > now for end in ends):
                return
            batch.progress.clear()
            if not batch.done:
                await set_within(batch.progress, min(end for end in ends if end > now) - now)

    def close(self) -> None:
        self._leave_worker()

    def _no_thread(self, error: RuntimeError) -> None:
        if not self._limited:
            log.error("cannot probe cards: the system gives us no thread", reason=error)
        self._limited = True

    def _leave_worker(self) -> None:
        if self._worker:
            if job := self._worker.job:
                self._worker.thread.name = job.name
            self._worker.batches.put(None)
            self._worker = None


class _Batch:
    def __init__(
        self, jobs: Sequence[Job[Any]], loop: asyncio.AbstractEventLoop, *, awaited: bool
    ) -> None:
        self.began = time.monotonic()
        self.progress = asyncio.Event()
        """Set when a thread has finished, if a result is not as expected or `awaited` is set."""
        self.awaited = awaited
        self._jobs = tuple(jobs)
        self._waiting = deque(jobs)
        """Jobs that no thread has taken yet; the thread that pops one runs it."""
        self._loop = loop

    @property
    def done(self) -> bool:
        return all(job.done for job in self._jobs)

    def share_out(self) -> None:
        """Runs each job that waits on a thread of its own.

        Raises:
            RuntimeError: no thread is left; the jobs that still wait are not run.
        """
        while (job := self.take()) is not None:
            threading.Thread(target=self._alone, args=(job,), name=job.name, daemon=True).start()

    def take(self) -> Job[Any] | None:
        with suppress(IndexError):
            return self._waiting.popleft()
        return None

    def wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: the agent has ended
            self._loop.call_soon_threadsafe(self.progress.set)

    def _alone(self, job: Job[Any]) -> None:
        job.run()
        self.wake()


class _Worker:
    def __init__(self) -> None:
        """Raises RuntimeError if the system gives us no thread."""
        self.batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self.job: Job[Any] | None = None
        self.thread = threading.Thread(target=self._work, name="npu-probes", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (batch := self.batches.get()) is not None:
            news = False
            while (job := batch.take()) is not None:
                self.job = job
                job.run()
                self.job = None
                news = news or job.result != job.expected
            if news or batch.awaited:
                batch.wake()
            del batch, job  # not kept until the next one
