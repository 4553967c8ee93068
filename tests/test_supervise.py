import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

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


class Failing:
    """Fails (or ends, without an error) so many times, then works until it is cancelled."""

    def __init__(self, times: int, error: BaseException | None) -> None:
        self.runs = 0
        self.works = asyncio.Event()
        self._times = times
        self._error = error

    async def __call__(self) -> None:
        self.runs += 1
        if self.runs <= self._times:
            if self._error is not None:
                raise self._error
            return
        self.works.set()
        await asyncio.Event().wait()


async def until_cancelled(
    run: Callable[[], Coroutine[Any, Any, None]], works: asyncio.Event, steady: float = 60.0
) -> Counter[str]:
    """Keeps a part running until it works, then cancels it as a shutdown does; its restarts."""
    restarts = Counter[str]()
    task = asyncio.create_task(keep_running("inventory", run, restarts, steady=steady))
    async with asyncio.timeout(30):
        await works.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    return restarts


async def test_a_part_that_fails_comes_back_after_longer_and_longer_pauses(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    run = Failing(10, OSError("disk on fire"))
    await until_cancelled(run, run.works)
    assert run.runs == 11
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    assert len(caplog.records) == 10
    first = caplog.records[0]
    assert (first.levelname, first.fields) == ("ERROR", {"part": "inventory"})  # type: ignore[attr-defined]
    assert first.exc_info is not None
    assert str(first.exc_info[1]) == "disk on fire"


@pytest.mark.usefixtures("pauses")
async def test_a_part_that_ends_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    run = Failing(3, None)
    await until_cancelled(run, run.works)
    assert run.runs == 4
    assert caplog.messages == ["a part of the agent ended; restarting it"] * 3


async def test_a_part_that_ran_for_long_starts_at_the_first_pause_again(
    pauses: list[float],
) -> None:
    run = Failing(3, OSError("now and then"))
    await until_cancelled(run, run.works, steady=-1.0)
    assert pauses == [0.2, 0.2, 0.2]


@pytest.mark.parametrize("fails", [True, False])
async def test_a_part_that_fails_or_goes_on_while_it_is_cancelled_ends_all_the_same(
    fails: bool,
) -> None:
    started = asyncio.Event()

    async def run() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if fails:
                raise OSError("the cleaning up failed") from None

    await until_cancelled(run, started)


@pytest.mark.usefixtures("pauses")
async def test_a_part_that_something_in_it_cancels_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As grpclib does to wake its callers up; nobody asked the part to end."""
    runs = 0
    works = asyncio.Event()

    async def run() -> None:
        nonlocal runs
        runs += 1
        this = asyncio.current_task()
        assert this is not None
        if runs == 1:
            this.cancel()
            await asyncio.Event().wait()
        if runs == 2:  # it was woken up, and then fails for another reason
            this.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            raise OSError("something else")
        assert this.cancelling() == 0  # nothing is left of what was before
        works.set()
        await asyncio.Event().wait()

    await until_cancelled(run, works)
    assert caplog.messages == ["a part of the agent failed; restarting it"] * 2


async def test_cancelling_twice_waits_for_the_part_all_the_same() -> None:
    started, ending, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ended = []

    async def run() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            while not end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await end.wait()
            ended.append(True)

    task = asyncio.create_task(keep_running("plugin", run, Counter()))
    async with asyncio.timeout(20):
        await started.wait()
        task.cancel()
        await ending.wait()
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        end.set()
        await asyncio.wait([task])
    assert task.cancelled()
    assert ended == [True]
