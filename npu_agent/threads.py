"""Blocking calls on a daemon thread, for what may hang: a file system, a device, a name look-up."""

from __future__ import annotations

import _thread
import asyncio
import errno
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThread(Executor):
    """Runs calls in order on one daemon thread, which ends `linger` seconds after the last one.

    Not asyncio's default executor: a call that hangs would take one of its few threads for good,
    and `asyncio.run` and the interpreter wait for those at exit. While a call hangs, the ones after
    it wait; those whose caller has given up never run.
    """

    def __init__(self, *, linger: float = 2.0) -> None:
        self._linger = linger
        self._lock = threading.Condition()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._runs = False
        """Whether a thread takes the calls; a thread says so itself, as it may never begin."""

    def submit(
        self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs
    ) -> Future[T]:
        """Raises OSError if the system gives us no more threads.

        A call whose thread finds no memory to begin may never be made: wait for it with a deadline.
        """
        future: Future[T] = Future()
        with self._lock:
            waiting = (call for call in self._calls if not call[0].cancelled())
            self._calls = deque([*waiting, (future, partial(function, *arguments, **named))])
            if self._runs:
                self._lock.notify()
                return future
            try:
                # Not threading.Thread, which waits for its thread to begin: without memory for
                # ever (github.com/python/cpython/issues/140746), and the event loop with it.
                _thread.start_new_thread(self._work, ())
            except (RuntimeError, MemoryError) as error:
                self._calls.pop()
                message = "no more threads: check the limit of processes"
                raise OSError(errno.EAGAIN, message) from error
        return future

    async def call(self, function: Callable[[], T], *, deadline: float) -> T:
        """Returns what `function` returns, or raises what it raises.

        Raises:
            OSError: as `submit`; a TimeoutError after `deadline` seconds, with strerror.
        """
        async with within(deadline):
            return await asyncio.get_running_loop().run_in_executor(self, function)

    def _work(self) -> None:
        with self._lock:
            if self._runs:  # another call's thread has begun first
                return
            self._runs = True
        try:
            while self._makes_a_call():
                pass
        except MemoryError:
            self._runs = False  # the next call gets a thread; this one's caller has a deadline

    def _makes_a_call(self) -> bool:
        with self._lock:
            if not self._calls and not self._lock.wait_for(lambda: self._calls, self._linger):
                self._runs = False
                return False
            future, function = self._calls.popleft()
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:  # the caller's to handle
                future.set_exception(error)
            else:
                future.set_result(result)
        del future  # whose error has this frame in its traceback
        return True


@asynccontextmanager
async def within(deadline: float) -> AsyncIterator[None]:
    """`asyncio.timeout` of `deadline` seconds, with an error that has words for people.

    Want of memory is an OSError too: who can go on without the answer goes on.

    The words are always the same: they are shown, and what is shown is compared.
    """
    try:
        async with asyncio.timeout(deadline) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise  # of the operating system
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {deadline:g} s") from error
    except MemoryError as error:
        raise OSError(errno.ENOMEM, "no more memory") from error
