"""Follows objects of the API server: list, then watch.

A watch goes on where it ended, by resourceVersion; where that cannot be, the objects are listed
again. So it is after an outage, since an API server that has restarted knows no older versions.
All pauses have full jitter.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import msgspec

from npu_agent.backoff import Backoff
from npu_agent.kube.client import Api, WatchEvent
from npu_agent.kube.errors import ApiError, ErrorKind, unusable
from npu_agent.kube.request import Request
from npu_agent.ticks import set_within
from npu_agent.typedjson import InvalidJsonError, convert

_SILENCE = 150.0
"""Seconds: the API server sends a bookmark each minute (k8s.io/apiserver, cacher.go,
defaultBookmarkFrequency), so two that are missing are a connection that is broken."""

BROKEN = (ErrorKind.UNREACHABLE, ErrorKind.TIMEOUT)
"""No answer: the API server may have been restarted."""
_RESUMED = (ErrorKind.SERVER, ErrorKind.TOO_MANY, ErrorKind.UNAUTHORIZED, ErrorKind.CREDENTIALS)
"""After these a watch goes on where it was, and so it does if it breaks. After others, such as 410,
the objects are listed."""
_BACK = 4
"""Tries that count as made when an API server that was away refuses the next one: it has not read
its roles yet, or is asked too much. The pauses go on from 8 s."""


class ObjectVersion(msgspec.Struct, frozen=True, rename="camel"):
    """The metadata of a list, or of an object."""

    resource_version: Annotated[str, msgspec.Meta(min_length=1)]


class Versioned(msgspec.Struct, frozen=True):
    """An object or list with a version."""

    metadata: ObjectVersion


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


class Seen(NamedTuple):
    """A change of a watched object."""

    type: str
    """``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK``."""
    version: str
    object: Any
    """As the answer of the watch's request; None: a bookmark has only a version."""


@contextlib.asynccontextmanager
async def watched(
    api: Api, request: Request[Any], version: str, seconds: float
) -> AsyncIterator[AsyncIterator[Seen]]:
    """Opens a watch: the events after a version, until the API server ends it in so many seconds.

    The query of `request` says which objects.
    """
    query = {
        **request.query,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": str(round(seconds)),
    }
    async with api.watch(replace(request, query=query), silence=_SILENCE) as events:
        yield (_read(request, event) async for event in events)


def _read(request: Request[Any], event: WatchEvent) -> Seen:
    if event.type not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
        raise unusable(request, ValueError("an event of an unknown type"))
    try:
        version = convert(event.object, Versioned).metadata.resource_version
        value = None if event.type == "BOOKMARK" else convert(event.object, request.answer)
    except InvalidJsonError as error:
        raise unusable(request, error) from error
    return Seen(event.type, version, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchHooks:
    """Callbacks for what `follow` finds."""

    list_: Callable[[], Awaitable[str]]
    """Lists the objects; returns the version from which on they have to be watched."""
    see: Callable[[Seen], None]
    """Takes an event that is not a bookmark."""
    opened: Callable[[], None]
    """Called when a watch is open."""
    failed: Callable[[str, ApiError, bool], None]
    """Called with what failed, ``list`` or ``watch``, and whether that is any trouble: a watch that
    breaks, or begins with too old a version, is none as long as the next one can be opened."""
    hurry: Callable[[], asyncio.Event] = asyncio.Event
    """Gives what ends a pause, when it is set."""


async def follow(api: Api, watch: Request[Any], hooks: WatchHooks, timing: WatchTiming) -> None:
    """Follows the objects of a watch (see `watched`) until cancelled."""
    loop = asyncio.get_running_loop()
    retry, away = Backoff(longest=timing.retry_longest, even=True), False
    version = ""
    while True:
        hurried = hooks.hurry()
        doing, since, wait = "list", math.inf, None
        try:
            if not version:
                version = await hooks.list_()
            doing = "watch"
            seconds = random.uniform(timing.shortest, timing.longest)  # noqa: S311 (spreads load)
            async with watched(api, watch, version, seconds) as events:
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
