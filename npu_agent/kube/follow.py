"""List, then watch: how a part follows objects of the API server.

A watch goes on where it ended, by resourceVersion; where that cannot be, the objects are listed
again. All pauses have full jitter.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from npu_agent.backoff import Backoff
from npu_agent.kube.client import Api, WatchEvent
from npu_agent.kube.errors import ApiError, Kind, unusable
from npu_agent.kube.request import Request
from npu_agent.ticks import set_within
from npu_agent.typedjson import InvalidJsonError, convert

_SILENCE = 150.0
"""Seconds: the API server sends a bookmark each minute (k8s.io/apiserver, cacher.go,
defaultBookmarkFrequency), so two that are missing are a connection that is broken."""

BROKEN = (Kind.UNREACHABLE, Kind.TIMEOUT)
"""No answer: the API server may have been restarted."""
_RESUMED = (*BROKEN, Kind.SERVER, Kind.TOO_MANY, Kind.UNAUTHORIZED, Kind.CREDENTIALS)
"""After these a watch goes on where it was. After others, such as 410, the objects are listed."""


class Version(msgspec.Struct, frozen=True, rename="camel"):
    """The metadata of a list, or of an object."""

    resource_version: Annotated[str, msgspec.Meta(min_length=1)]


class Versioned(msgspec.Struct, frozen=True):
    """Anything of the API server that has a version."""

    metadata: Version


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


@contextlib.asynccontextmanager
async def watched(
    api: Api, kind: str, selected: Mapping[str, str], as_: type[Any], version: str, seconds: float
) -> AsyncIterator[AsyncIterator[WatchEvent]]:
    """Opens a watch for so many seconds: the events after a version.

    Args:
        api: the API server.
        kind: of the objects.
        selected: which of them, as a query.
        as_: what each object has to have.
        version: of a list, or of the object of an event.
        seconds: then the API server ends it.
    """
    query = {
        **selected,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": str(round(seconds)),
    }
    request = Request(verb="watch", kind=kind, answer=WatchEvent, query=query)
    async with api.watch(request, silence=_SILENCE) as events:
        yield _checked(request, events, as_)


async def _checked(
    request: Request[Any], events: AsyncIterator[WatchEvent], as_: type[Any]
) -> AsyncIterator[WatchEvent]:
    async for event in events:
        try:
            convert(event.object, Versioned)
            if event.type != "BOOKMARK":
                convert(event.object, as_)
        except InvalidJsonError as error:
            raise unusable(request, error) from error
        if event.type not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
            raise unusable(request, ValueError("an event of an unknown type"))
        yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What one does with what `follow` finds."""

    see: Callable[[WatchEvent], None]
    """Takes an event that is no bookmark."""
    opened: Callable[[], None]
    """Called when a watch is open."""
    failed: Callable[[str, ApiError, bool], None]
    """Called with what failed, ``list`` or ``watch``, and whether that is any trouble: a watch that
    breaks, or begins with too old a version, is none as long as the next one can be opened."""
    hurry: Callable[[], asyncio.Event] = asyncio.Event
    """Gives what ends a pause, when it is set."""


async def follow(
    *,
    list_: Callable[[], Awaitable[str]],
    watch: Callable[[str, float], AbstractAsyncContextManager[AsyncIterator[WatchEvent]]],
    hooks: Hooks,
    timing: Timing = Timing(),
) -> None:
    """Follows objects until cancelled.

    Args:
        list_: lists them; returns the version from which on they have to be watched.
        watch: opens a watch from a version, for so many seconds. The object of each event has its
            resourceVersion.
        hooks: for what is found.
        timing: all times.
    """
    retry, loop = Backoff(longest=timing.retry_longest), asyncio.get_running_loop()
    version = ""
    while True:
        hurried = hooks.hurry()
        doing, since, wait = "list", math.inf, None
        try:
            if not version:
                version = await list_()
            doing = "watch"
            seconds = random.uniform(timing.shortest, timing.longest)  # noqa: S311 (spreads load)
            async with watch(version, seconds) as events:
                since = loop.time()
                hooks.opened()
                async for event in events:
                    version = event.object["metadata"]["resourceVersion"]
                    if event.type != "BOOKMARK":
                        hooks.see(event)
        except ApiError as error:
            wait = error.retry_after
            if error.kind not in _RESUMED:
                version = ""
            hooks.failed(
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
