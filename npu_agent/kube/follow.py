"""Follows objects of the API server: list, then watch.

A watch goes on where it ended, by resourceVersion; where that cannot be, the objects are listed
again. So it is after an outage, since an API server that has restarted knows no older versions.
All pauses have full jitter.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from npu_agent.backoff import Backoff
from npu_agent.kube.client import Api, WatchEvent
from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.kube.request import Request
from npu_agent.ticks import set_within

BROKEN = (ErrorKind.UNREACHABLE, ErrorKind.TIMEOUT)
"""No answer: the API server may have been restarted."""
_RESUMED = (ErrorKind.SERVER, ErrorKind.TOO_MANY, ErrorKind.UNAUTHORIZED, ErrorKind.CREDENTIALS)
"""After these a watch goes on where it was, and so it does if it breaks. After others, such as 410,
the objects are listed."""
_BACK = 4
"""Tries that count as made when an API server that was away refuses the next one: it has not read
its roles yet, or is asked too much. The pauses go on from 8 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTiming:
    """Seconds."""

    retry_longest: float = 170.0
    """Between attempts, after failures, at most: after a long outage those of 5,000 nodes come
    evenly within that time, and all have come within three minutes (docs/scale.md)."""
    shortest: float = 300.0
    """That a watch is asked for, at random up to `longest`: as client-go does."""
    longest: float = 600.0
    steady: float = 5.0
    """Shortest watch that counts as a success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchHooks:
    """Callbacks for what `follow` finds."""

    see: Callable[[WatchEvent], None]
    """Takes an event that is not a bookmark."""
    opened: Callable[[], None]
    """Called when a watch is open."""
    failed: Callable[[str, ApiError, bool], None]
    """Called with what failed, ``list`` or ``watch``, and whether that is any trouble: a watch that
    breaks, or begins with too old a version, is none as long as the next one can be opened."""
    list_: Callable[[], Awaitable[str]] | None = None
    """Lists the objects; returns the version from which on they have to be watched. None: a watch
    begins with the objects as they are, and no list is needed."""
    hurry: Callable[[], asyncio.Event] = asyncio.Event
    """Gives what ends a pause, when it is set."""


async def follow(api: Api, watch: Request[Any], hooks: WatchHooks, timing: WatchTiming) -> None:
    """Follows the objects of a watch (see `Api.watch`) until cancelled."""
    loop = asyncio.get_running_loop()
    retry = Backoff(longest=timing.retry_longest, even=True)
    away = False
    version = ""

    while True:
        hurried = hooks.hurry()
        doing = "list"
        since = math.inf
        wait = None

        try:
            if not version:
                version = await hooks.list_() if hooks.list_ else "0"
            doing = "watch"
            seconds = random.uniform(timing.shortest, timing.longest)  # noqa: S311 (spreads load)
            async with api.watch(watch, version, seconds) as events:
                since = loop.time()
                hooks.opened()
                async for event in events:
                    version = event.version
                    if event.type != "BOOKMARK":
                        hooks.see(event)
        except ApiError as error:
            wait = error.retry_after
            broken = error.kind in BROKEN
            if away and not broken:
                retry.tries = _BACK
            away = broken and since == math.inf
            if away or not (broken or error.kind in _RESUMED):
                version = ""
            hooks.failed(doing, error, error.status != 410 and (away or not broken))
        else:
            if loop.time() - since < timing.steady:
                version = ""  # a proxy may end each watch before there is any event
        if loop.time() - since > timing.steady:
            retry.reset()
        if await set_within(hurried, retry.next(wait)):
            retry.reset()
