"""When a part that follows objects tries again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from bench.fleet.outage import run
from npu_agent.kube import Api, ApiError, ErrorKind, follow
from npu_agent.kube.client import SILENCE, WatchEvent
from npu_agent.kube.node import ThisNode
from npu_agent.kube.request import Request
from tests.until import until


def following(api: object, list_: Callable[[], Awaitable[str]] | None = None) -> asyncio.Task[None]:
    """A part that follows Nodes with the usual pauses, and does nothing with what it sees."""
    hooks = follow.WatchHooks(
        list_=list_, see=lambda _: None, opened=lambda: None, failed=lambda *_: None
    )
    watch = Request("watch", "Node", ThisNode)
    return asyncio.create_task(follow.follow(cast("Api", api), watch, hooks, follow.WatchTiming()))


async def test_an_answer_after_an_outage_has_the_pauses_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = [*[ErrorKind.UNREACHABLE] * 15, *[ErrorKind.TOO_MANY] * 3]
    pauses: list[float] = []

    async def noted(_: asyncio.Event, seconds: float) -> bool:
        pauses.append(seconds)
        return False

    async def list_() -> str:
        if len(pauses) == len(kinds):
            await asyncio.Event().wait()
        raise ApiError("cannot list", kind=kinds[len(pauses)])

    monkeypatch.setattr(follow, "set_within", noted)
    task = following(Api(), list_)
    await until(lambda: len(pauses) == len(kinds))
    task.cancel()
    assert set(pauses[10:15]) == {follow.WatchTiming().retry_longest}
    for pause, longest in zip(pauses[15:], (8.0, 16.0, 32.0), strict=True):
        assert pause <= longest


HOUR = 3600.0
COMPACTION = 300.0
"""Seconds between two compactions of etcd, each up to the one before (apiserver, compact.go)."""


class Uncached:
    """An API server without a watch cache: it sends no bookmarks, and etcd forgets old versions."""

    def __init__(self, changes: float) -> None:
        """The object changes each so many seconds; a version is the time it was made."""
        self.asked: Counter[str] = Counter()
        self._changes = changes

    async def list_(self) -> str:
        self.asked["list"] += 1
        return str(now())

    @asynccontextmanager
    async def watch(
        self, _request: Request[Any], version: str, seconds: float
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """As `Api.watch`."""
        self.asked["watch"] += 1
        yield self._events(float(version), now() + seconds)

    async def _events(self, version: float, end: float) -> AsyncIterator[Any]:
        if version and version < (now() // COMPACTION - 1) * COMPACTION:
            raise ApiError("too old", kind=ErrorKind.REFUSED, status=410)
        if not version:
            yield changed(now())
        while True:
            wait = self._changes - now() % self._changes
            if now() + min(wait, SILENCE) >= end:
                await asyncio.sleep(end - now())
                return
            await asyncio.sleep(min(wait, SILENCE))
            if wait > SILENCE:
                raise ApiError("not a byte", kind=ErrorKind.TIMEOUT)
            yield changed(now())


def now() -> float:
    return asyncio.get_running_loop().time()


def changed(version: float) -> WatchEvent:
    return WatchEvent("MODIFIED", str(version), None)


@pytest.mark.parametrize(
    ("changes", "from_now", "hourly"),
    [
        pytest.param(300.0, True, {"watch": 12}, id="the Node: its kubelet writes each 5 minutes"),
        pytest.param(10 * HOUR, False, {"watch": 30, "list": 6}, id="slices: nothing happens"),
    ],
)
def test_what_a_watch_without_bookmarks_costs_in_an_hour(
    changes: float, from_now: bool, hourly: dict[str, int]
) -> None:
    """docs/scale.md says it."""
    server = Uncached(changes)

    async def play() -> None:
        task = following(server, None if from_now else server.list_)
        await asyncio.sleep(10 * HOUR)
        task.cancel()

    random.seed(1)
    run(play())
    assert {verb: count / 10 for verb, count in server.asked.items()} == pytest.approx(
        hourly, rel=0.05
    )
