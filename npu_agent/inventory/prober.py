"""Runs the blocking reads of a driver on one worker thread, each with a deadline.

Start reading at `Prober.run`. The event loop hands over a batch of jobs and gets back their
results. A job that misses its deadline keeps its thread; the jobs after it run on threads of their
own, and the next batch gets a new worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from npu_agent.logs import Reporter, logger
from npu_agent.threads import DaemonThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logger(__name__)

T = TypeVar("T")

READ_DEADLINE = 0.5  # seconds


@dataclass(slots=True, eq=False)
class Job(Generic[T]):
    """A blocking call that does not raise. Its thread writes `begun`, `result` and then `done`."""

    call: Callable[[], T]
    begun: bool = False
    result: T | None = None
    done: bool = False

    def run(self) -> None:
        self.begun = True
        self.result = self.call()
        self.done = True


class Prober:
    """Runs batches of jobs, one batch at a time."""

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline or READ_DEADLINE
        self._worker = DaemonThread()
        self._threads = Reporter(log, "cannot probe cards: the system gives us no thread")

    @property
    def late(self) -> str:
        """The reason while a read hangs: always the same, because it is shown and compared."""
        return f"no answer within {self.deadline:g} s"

    async def run(self, jobs: Sequence[Job[Any]]) -> None:
        """Returns when each job is `done`, has missed its deadline, or found no thread.

        That takes two deadlines at most, however many hang.
        """
        loop, waiting = asyncio.get_running_loop(), deque(jobs)
        futures: list[asyncio.Future[None]] = []
        try:
            futures.append(loop.run_in_executor(self._worker, _run_each, waiting))
            await asyncio.wait(futures, timeout=self.deadline)
            if not futures[0].done():
                # A job hangs, or many are slow. Those that wait must not wait for each other.
                self._worker = DaemonThread()
                try:
                    while job := _next(waiting):
                        futures.append(loop.run_in_executor(DaemonThread(), job.run))
                finally:
                    await asyncio.wait(futures, timeout=self.deadline)
            self._threads.works()
        except OSError as error:
            self._threads.failed(error)
        finally:
            for future in futures:
                future.cancel()


def _run_each(waiting: deque[Job[Any]]) -> None:
    while job := _next(waiting):
        job.run()


def _next(waiting: deque[Job[Any]]) -> Job[Any] | None:
    """Takes a job, which no other thread then runs."""
    with suppress(IndexError):
        return waiting.popleft()
    return None
