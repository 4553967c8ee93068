"""Waiting for a condition; the deadline guards against hanging and measures nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar, cast, overload

from npu_agent.feed import Feed

T = TypeVar("T")

DEADLINE = 30.0
"""Seconds."""


@overload
async def until(
    condition: Callable[[], Awaitable[T]],
    what: str = ...,
    *,
    deadline: float = ...,
    interval: float = ...,
) -> T: ...


@overload
async def until(
    condition: Callable[[], T], what: str = ..., *, deadline: float = ..., interval: float = ...
) -> T: ...


async def until(
    condition: Callable[[], T | Awaitable[T]],
    what: str = "",
    *,
    deadline: float = DEADLINE,
    interval: float = 0.002,
) -> T:
    """Asks until the answer is true, and returns it; meanwhile the loop goes on.

    Args:
        condition: what is asked, a coroutine function too.
        what: for the message of the failure.
        deadline: seconds.
        interval: seconds between two questions; 0 lets the other tasks run once.
    """
    end = time.monotonic() + deadline
    while True:
        answer = condition()
        if isawaitable(answer):
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                answer = await answer
        if answer:
            return cast("T", answer)
        assert time.monotonic() < end, f"not within {deadline:g} s: {what or condition}"
        await asyncio.sleep(interval)


def wait_until(condition: Callable[[], T], what: str = "", *, deadline: float = DEADLINE) -> T:
    """The same where there is no loop."""
    end = time.monotonic() + deadline
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {deadline:g} s: {what or condition}"
        time.sleep(0.002)
    return answer


async def first(
    feed: Feed[T], condition: Callable[[T], object], *, deadline: float = DEADLINE
) -> T:
    """The first value of a feed from now on that fulfils the condition."""
    async with asyncio.timeout(deadline):
        return await feed.until(condition)
