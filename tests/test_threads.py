"""Blocking calls on a daemon thread: in order, with a deadline, and without a trace of hangs."""

import _thread
import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from textwrap import dedent

import pytest

from npu_agent.threads import DaemonThread
from tests.threads import working
from tests.until import until

DEADLINE = 20.0


@pytest.fixture
def free() -> threading.Event:
    return threading.Event()


async def test_a_call_returns_and_raises_what_the_function_does() -> None:
    thread = DaemonThread()
    assert await thread.call(lambda: 1 + 1, deadline=DEADLINE) == 2
    with pytest.raises(FileNotFoundError):
        await thread.call(lambda: Path("/nonexistent").read_bytes(), deadline=DEADLINE)


async def test_calls_are_made_in_order_and_timed_out_ones_never(
    free: threading.Event,
) -> None:
    thread, made = DaemonThread(), []
    hanging = asyncio.create_task(thread.call(lambda: free.wait(DEADLINE), deadline=DEADLINE))
    await asyncio.sleep(0)
    for number in range(3):
        with pytest.raises(TimeoutError):
            await thread.call(lambda number=number: made.append(number), deadline=0.01)  # type: ignore[misc]
    last = asyncio.create_task(thread.call(lambda: made.append("last"), deadline=DEADLINE))
    await asyncio.sleep(0)
    assert [*working()].count(thread) == 1
    free.set()
    await asyncio.gather(hanging, last)
    assert made == ["last"]


async def test_the_thread_ends_when_there_is_nothing_to_do() -> None:
    thread = DaemonThread(linger=0.0)
    for _ in range(2):
        assert await thread.call(lambda: thread in working(), deadline=DEADLINE)
        await until(lambda: thread not in working())


def test_a_hang_does_not_hold_up_the_exit() -> None:
    python("import time; DaemonThread().submit(time.sleep, 1000)")


async def test_without_a_thread_a_call_fails_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    thread, made = DaemonThread(), []
    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", refuse)
        with pytest.raises(OSError, match="no more threads"):
            await thread.call(lambda: made.append("first"), deadline=DEADLINE)
    await thread.call(lambda: made.append("second"), deadline=DEADLINE)
    assert made == ["second"]


async def test_want_of_memory_is_an_error_of_the_system() -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(OSError, match="no more memory"):
        await DaemonThread().call(fail, deadline=DEADLINE)


def test_a_thread_without_memory_to_begin_delays_no_caller() -> None:
    """Its stack is that of an ended thread; there is no memory for Python's first frame."""
    python(
        """
        import os, resource, time
        thread = DaemonThread(linger=0.0)
        thread.submit(int).result()
        while len(os.listdir("/proc/self/task")) > 1:
            time.sleep(0.001)
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, limits[1]))
        try:
            lost = thread.submit(int)
            while len(os.listdir("/proc/self/task")) > 1:
                time.sleep(0.001)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert not lost.done()
        lost.cancel()
        assert thread.submit(int, "7").result() == 7
        """
    )


async def test_a_thread_that_ends_for_want_of_memory_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread, failed = DaemonThread(), threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Future, "set_result", fail)
        thread.submit(int)
        await until(lambda: failed.is_set() and thread not in working())
    assert await thread.call(lambda: 7, deadline=DEADLINE) == 7


async def test_a_second_thread_that_begins_makes_no_call(
    monkeypatch: pytest.MonkeyPatch, free: threading.Event
) -> None:
    """It is started for a call that comes before the first one's thread has begun."""
    thread, begin = DaemonThread(linger=0.0), []
    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", lambda work, _: begin.append(work))
        first, second = thread.submit(free.wait, DEADLINE), thread.submit(int)
    _thread.start_new_thread(begin[0], ())
    await until(first.running)
    begin[1]()
    assert not second.done()
    free.set()
    assert (first.result(DEADLINE), second.result(DEADLINE)) == (True, 0)


def python(code: str) -> None:
    """Runs it in a process of its own, which ends by itself."""
    whole = f"from npu_agent.threads import DaemonThread\n{dedent(code)}"
    subprocess.run([sys.executable, "-c", whole], check=True, timeout=3 * DEADLINE)
