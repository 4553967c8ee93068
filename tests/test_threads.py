"""Blocking calls on a daemon thread: in order, with a deadline, and without a trace of hangs."""

import asyncio
import threading
from pathlib import Path

import pytest

from npu_agent.threads import DaemonThread

DEADLINE = 20.0


@pytest.fixture
def free() -> threading.Event:
    return threading.Event()


async def test_it_returns_and_raises_what_the_function_does() -> None:
    thread = DaemonThread("npu-test")
    assert await thread.call(lambda: 1 + 1, deadline=DEADLINE) == 2
    with pytest.raises(FileNotFoundError):
        await thread.call(lambda: Path("/nonexistent").read_bytes(), deadline=DEADLINE)


async def test_a_hang_ends_at_the_deadline_with_words(free: threading.Event) -> None:
    thread = DaemonThread("npu-test")
    try:
        with pytest.raises(TimeoutError) as caught:
            await thread.call(lambda: free.wait(DEADLINE), deadline=0.02)
        assert caught.value.strerror == "no answer within 0.02 s"
    finally:
        free.set()


async def test_calls_are_made_in_order_and_those_that_nobody_waits_for_never(
    free: threading.Event,
) -> None:
    thread, made = DaemonThread("npu-only"), []
    hanging = asyncio.create_task(thread.call(lambda: free.wait(DEADLINE), deadline=DEADLINE))
    await asyncio.sleep(0)
    for number in range(3):
        with pytest.raises(TimeoutError):
            await thread.call(lambda number=number: made.append(number), deadline=0.01)  # type: ignore[misc]
    last = asyncio.create_task(thread.call(lambda: made.append("last"), deadline=DEADLINE))
    await asyncio.sleep(0)
    assert [each.name for each in threading.enumerate()].count("npu-only") == 1
    free.set()
    await asyncio.gather(hanging, last)
    assert made == ["last"]


async def test_the_thread_is_a_daemon_and_ends_when_there_is_nothing_to_do() -> None:
    thread = DaemonThread("npu-test", linger=0.0)
    by = await thread.call(threading.current_thread, deadline=DEADLINE)
    assert by.daemon
    async with asyncio.timeout(DEADLINE):
        while by.is_alive():
            await asyncio.sleep(0.001)
    assert await thread.call(threading.current_thread, deadline=DEADLINE) is not by


async def test_without_a_thread_a_call_fails_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread, made = DaemonThread("npu-test"), []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="no more threads"):
            await thread.call(lambda: made.append("first"), deadline=DEADLINE)
    await thread.call(lambda: made.append("second"), deadline=DEADLINE)
    assert made == ["second"]
