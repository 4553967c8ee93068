"""Questions that a thread repeats: when the loop is woken, and when it is not."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable

import pytest

from npu_agent.repeats import Repeat, until_changed
from npu_agent.threads import DaemonThread
from tests.until import until

DEADLINE = 0.2


class Answers:
    """A question whose answers a test chooses."""

    def __init__(self) -> None:
        self.answer = "as before"
        self.asked = 0
        self.released = threading.Event()
        self.released.set()

    def __call__(self) -> str:
        self.asked += 1
        self.released.wait()
        return self.answer


def repeat(ask: Callable[[], str], every: float = 0.01, due: float | None = None) -> Repeat[str]:
    """A question that is due now, unless it says when."""
    if due is None:
        due = time.monotonic()
    return Repeat(ask=ask, expected="as before", every=every, due=due)


async def wait(
    *repeats: Repeat[str], until: float = math.inf, wake: tuple[asyncio.Event, ...] = ()
) -> Repeat[str] | None:
    async with asyncio.timeout(30):
        return await until_changed(
            DaemonThread(), repeats, deadline=DEADLINE, until=until, wake=wake
        )


async def test_the_loop_sleeps_while_answers_stay_and_wakes_at_the_first_other_one() -> None:
    steady, answers = Answers(), Answers()
    changing = repeat(answers)
    waiting = asyncio.create_task(wait(repeat(steady), changing))
    await until(lambda: answers.asked > 5)
    assert not waiting.done()
    answers.answer = "another"
    assert await waiting is changing
    assert changing.done


async def test_a_question_is_asked_when_it_is_due_and_no_other() -> None:
    often, seldom = Answers(), Answers()
    later = repeat(seldom, due=time.monotonic() + 3600)
    waiting = asyncio.create_task(wait(repeat(often), later))
    await until(lambda: often.asked > 5)
    waiting.cancel()
    assert seldom.asked == 0


async def test_a_question_without_an_answer_is_returned_and_is_done_once_it_has_come() -> None:
    answers = Answers()
    answers.released.clear()
    hung = repeat(answers)
    try:
        assert await wait(repeat(Answers()), hung) is hung
        assert not hung.done
    finally:
        answers.released.set()
    await until(lambda: hung.done)


async def test_the_end_waits_for_the_question_that_is_being_asked() -> None:
    """Else the caller would ask the same card on a second thread, which would hang as well."""
    answers = Answers()
    answers.released.clear()
    hung = repeat(answers)
    woken = asyncio.Event()
    waiting = asyncio.create_task(wait(hung, wake=(woken,)))
    try:
        await until(lambda: answers.asked)
        woken.set()
        assert await waiting is hung
    finally:
        answers.released.set()


@pytest.mark.parametrize("asks", [0, 1])
async def test_a_time_and_an_event_end_it(asks: int) -> None:
    repeats = [repeat(Answers()) for _ in range(asks)]
    assert await wait(*repeats, until=time.monotonic() + 0.01) is None
    woken = asyncio.Event()
    woken.set()
    assert await wait(*repeats, wake=(woken,)) is None


async def test_a_thread_that_never_begins_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_agent.repeats._LONG", 0.0)
    thread = DaemonThread()
    blocked = threading.Event()
    thread.submit(blocked.wait)
    try:
        with pytest.raises(OSError, match="does not let our thread begin"):
            async with asyncio.timeout(30):
                await until_changed(
                    thread, [repeat(Answers())], deadline=DEADLINE, until=math.inf, wake=()
                )
    finally:
        blocked.set()
