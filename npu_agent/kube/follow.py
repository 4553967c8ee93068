"""List, then watch: how a part follows objects of the API server.

A watch goes on where it ended, by resourceVersion; where that cannot be, the objects are listed
again. All pauses have full jitter.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from npu_agent.backoff import ApiBackoff
from npu_agent.kube.client import WatchEvent
from npu_agent.kube.errors import ApiError, Kind
from npu_agent.ticks import set_within

SILENCE = 150.0
"""Seconds: the API server sends a bookmark each minute (k8s.io/apiserver, cacher.go,
defaultBookmarkFrequency), so two that are missing are a connection that is broken."""

BROKEN = (Kind.UNREACHABLE, Kind.TIMEOUT)
"""No answer: the API server may have been restarted."""
_RESUMED = (*BROKEN, Kind.SERVER, Kind.TOO_MANY, Kind.UNAUTHORIZED, Kind.CREDENTIALS)
"""After these a watch goes on where it was. After others, such as 410, the objects are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds."""

    retry_longest: float = 60.0
    """Between attempts, after failures: at most, and at random."""
    shortest: float = 300.0
    """That a watch is asked for, at random up to `longest`: as client-go does."""
    longest: float = 600.0
    steady: float = 5.0
    """That a watch has to last to count as one that worked."""


async def follow(
    *,
    list_: Callable[[], Awaitable[str]],
    watch: Callable[[str, float], AbstractAsyncContextManager[AsyncIterator[WatchEvent]]],
    see: Callable[[WatchEvent], None],
    opened: Callable[[], None],
    failed: Callable[[str, ApiError, bool], None],
    hurry: Callable[[], asyncio.Event] = asyncio.Event,
    timing: Timing = Timing(),
) -> None:
    """Follows objects until cancelled.

    Args:
        list_: lists them; returns the version from which on they have to be watched.
        watch: opens a watch from a version, for so many seconds. The object of each event has its
            resourceVersion.
        see: takes an event that is no bookmark.
        opened: called when a watch is open.
        failed: called with what failed, ``list`` or ``watch``, and whether that is any trouble: a
            watch that breaks, or begins with too old a version, is none as long as the next one
            can be opened.
        hurry: gives what ends a pause, when it is set.
        timing: all times.
    """
    retry, loop = ApiBackoff(longest=timing.retry_longest), asyncio.get_running_loop()
    version = ""
    while True:
        hurried = hurry()
        doing, since, wait = "list", math.inf, None
        try:
            if not version:
                version = await list_()
            doing = "watch"
            seconds = random.uniform(timing.shortest, timing.longest)  # noqa: S311 (spreads load)
            async with watch(version, seconds) as events:
                since = loop.time()
                opened()
                async for event in events:
                    version = event.object["metadata"]["resourceVersion"]
                    if event.type != "BOOKMARK":
                        see(event)
        except ApiError as error:
            wait = error.retry_after
            if error.kind not in _RESUMED:
                version = ""
            failed(
                doing,
                error,
                error.status != 410 and (error.kind not in BROKEN or since == math.inf),
            )
        else:
            if loop.time() - since < timing.steady:
                version = ""  # a proxy may end each watch before there is any event
        if loop.time() - since > timing.steady:
            retry.reset()
        if await set_within(hurried, retry.next(wait)):
            retry.reset()
