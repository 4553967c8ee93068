import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from npu_agent.inventory.reader import HungError, Reader

LONG = 30.0


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    reader = Reader("test-reader")
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    yield reader
    reader.close()
    await asyncio.to_thread(reader._thread.join, LONG)
    assert not reader._thread.is_alive()
    assert not faults


async def free(reader: Reader) -> None:
    """Returns when the reader works again, which it has to do by itself."""
    async with asyncio.timeout(LONG):
        while reader.hangs:
            await asyncio.sleep(0.001)


async def test_a_call_returns_what_the_function_returns(reader: Reader) -> None:
    assert await reader.call(lambda: 42, deadline=LONG) == 42


async def test_a_call_runs_on_the_readers_own_daemon_thread(reader: Reader) -> None:
    thread = await reader.call(threading.current_thread, deadline=LONG)
    assert (thread.name, thread.daemon) == ("test-reader", True)
    assert await reader.call(threading.current_thread, deadline=LONG) is thread


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("nonsense"), TimeoutError("driver")])
async def test_a_call_raises_what_the_function_raises(reader: Reader, error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await reader.call(fail, deadline=LONG)
    assert caught.value is error
    assert await reader.call(lambda: 1, deadline=LONG) == 1


async def test_a_call_that_misses_its_deadline_hangs_and_the_reader_recovers(
    reader: Reader,
) -> None:
    answer = threading.Event()
    with pytest.raises(HungError, match=r"^no answer within 0\.01 s$"):
        await reader.call(answer.wait, deadline=0.01)
    assert reader.hangs
    called = []
    # At once, and with the very same words: what is shown of a hang does not change with time.
    with pytest.raises(HungError, match=r"^no answer within 0\.01 s$"):
        await reader.call(lambda: called.append(1), deadline=0.01)
    answer.set()
    await free(reader)
    assert not called
    assert await reader.call(lambda: "new", deadline=LONG) == "new"


async def test_a_late_answer_is_not_taken_for_the_next_one(reader: Reader) -> None:
    answer = threading.Event()

    def late() -> str:
        answer.wait()
        return "late"

    with pytest.raises(HungError):
        await reader.call(late, deadline=0.01)
    answer.set()
    await free(reader)
    for number in range(20):
        assert await reader.call(lambda number=number: number, deadline=LONG) == number  # type: ignore[misc]


async def test_a_late_error_is_nobodys(reader: Reader) -> None:
    answer = threading.Event()

    def late() -> None:
        answer.wait()
        raise OSError("too late")

    with pytest.raises(HungError):
        await reader.call(late, deadline=0.01)
    answer.set()
    await free(reader)
    assert await reader.call(lambda: 1, deadline=LONG) == 1


async def test_a_cancelled_call_ends_at_once_and_the_reader_recovers(reader: Reader) -> None:
    answer, started = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        answer.wait()

    call = asyncio.create_task(reader.call(wait, deadline=LONG))
    await asyncio.to_thread(started.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not answer.is_set()
    with pytest.raises(HungError):
        await reader.call(lambda: 1, deadline=LONG)
    answer.set()
    await free(reader)
    assert await reader.call(lambda: 1, deadline=LONG) == 1


def _returns() -> int:
    return 1


def _raises() -> int:
    raise OSError("gone")


@pytest.mark.parametrize("function", [_returns, _raises])
async def test_cancellation_at_any_moment_does_not_wedge_it(
    reader: Reader, function: Callable[[], int]
) -> None:
    """Before the call starts, while the thread works, when the answer is on its way, after."""
    for turns in (*range(6), *range(6)):
        call = asyncio.create_task(reader.call(function, deadline=LONG))
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns % 2:  # let the thread win the race
            await asyncio.to_thread(_returns)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await free(reader)
    assert await reader.call(lambda: 2, deadline=LONG) == 2


async def test_a_closed_reader_ends_its_thread_when_it_is_free() -> None:
    answer = threading.Event()
    reader = Reader("test-closed")
    with pytest.raises(HungError):
        await reader.call(answer.wait, deadline=0.01)
    reader.close()
    assert reader._thread.is_alive()
    answer.set()
    await asyncio.to_thread(reader._thread.join, LONG)
    assert not reader._thread.is_alive()


def test_an_answer_after_the_loop_has_closed_harms_nobody() -> None:
    answer = threading.Event()

    async def hang() -> Reader:
        reader = Reader("test-late")
        with pytest.raises(HungError):
            await reader.call(answer.wait, deadline=0.01)
        reader.close()
        return reader

    reader = asyncio.run(hang())
    answer.set()
    reader._thread.join(LONG)  # an exception in the thread would fail the test
    assert not reader._thread.is_alive()
