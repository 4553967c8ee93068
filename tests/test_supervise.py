import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from npu_agent import supervise
from npu_agent.backoff import Backoff
from npu_agent.supervise import keep_running


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were asked for; none is waited for, and nothing jitters."""
    asked: list[float] = []

    def pause(backoff: Backoff) -> float:
        asked.append(min(backoff.longest, backoff.first * 2.0**backoff.tries))
        backoff.tries += 1
        return 0.0

    monkeypatch.setattr(Backoff, "next", pause)
    return asked


async def until_cancelled(part: str, run: Callable[[], Awaitable[None]]) -> None:
    """Keeps `run` running until it cancels itself."""
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await keep_running(part, run)


def failing(
    times: int, error: BaseException | None, runs: list[int]
) -> Callable[[], Awaitable[None]]:
    """Fails (or ends) so many times, then cancels its task as a shutdown does."""

    async def run() -> None:
        runs.append(1)
        if len(runs) <= times:
            if error is not None:
                raise error
            return
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        raise AssertionError("not cancelled")

    return run


async def test_a_part_that_fails_comes_back_after_longer_and_longer_pauses(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []
    await until_cancelled("inventory", failing(10, OSError("disk on fire"), runs))
    assert len(runs) == 11
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    assert len(caplog.records) == 10
    first = caplog.records[0]
    assert (first.levelname, first.fields) == ("ERROR", {"part": "inventory"})  # type: ignore[attr-defined]
    assert first.exc_info is not None
    assert str(first.exc_info[1]) == "disk on fire"


@pytest.mark.usefixtures("pauses")
async def test_a_part_that_ends_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []
    await until_cancelled("inventory", failing(3, None, runs))
    assert len(runs) == 4
    assert caplog.messages == ["a part ended and will be started again"] * 3


@pytest.mark.usefixtures("pauses")
async def test_a_group_of_failures_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    runs: list[int] = []
    group = ExceptionGroup("tasks", [ValueError("one"), OSError("two")])
    await until_cancelled("inventory", failing(1, group, runs))
    assert len(runs) == 2


async def test_a_part_that_ran_for_long_starts_at_the_first_pause_again(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_STEADY", -1.0)
    await until_cancelled("inventory", failing(3, OSError("now and then"), []))
    assert pauses == [0.2, 0.2, 0.2]


async def test_cancelling_ends_it_while_it_runs() -> None:
    started = asyncio.Event()

    async def run() -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(keep_running("inventory", run))
    await started.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_cancelling_ends_it_while_it_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pausing = asyncio.Event()

    def for_ever(_backoff: Backoff) -> float:
        pausing.set()
        return 3600.0

    monkeypatch.setattr(Backoff, "next", for_ever)

    async def run() -> None:
        raise OSError("gone")

    task = asyncio.create_task(keep_running("inventory", run))
    await pausing.wait()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_what_ends_the_process_passes_through() -> None:
    class End(BaseException):
        pass

    async def run() -> None:
        raise End

    with pytest.raises(End):
        await keep_running("inventory", run)


@pytest.mark.parametrize("fails", [True, False])
async def test_what_fails_or_goes_on_while_it_is_cancelled_ends_all_the_same(fails: bool) -> None:
    started = asyncio.Event()

    async def run() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if fails:
                raise OSError("the cleaning up failed") from None

    task = asyncio.create_task(keep_running("server", run))
    await started.wait()
    task.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([task])
    assert task.cancelled()
