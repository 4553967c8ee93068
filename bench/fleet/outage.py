"""When the watches of many nodes come back: `python -m bench.fleet.outage`.

The agent's own `follow`, in a time that is counted and not waited for, with an API server that
answers immediately: for more nodes than one machine can hold.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from bench.figure import HEADER, Figure
from bench.fleet.server import most_nodes, peak
from npu_agent.kube import Api, ApiError, ErrorKind, follow
from npu_agent.kube.client import WatchEvent
from npu_agent.kube.node import ThisNode
from npu_agent.kube.request import Request

PATIENCE = 400.0
"""Seconds after the outage."""


class CountedTime(asyncio.SelectorEventLoop):
    """Goes to the next moment at which there is anything to do."""

    _now = 0.0
    _scheduled: list[asyncio.TimerHandle]
    _ready: Any

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


@dataclass
class Outage:
    """An API server that is away from the beginning, and what it is asked when it is back."""

    seconds: float
    asked: list[float] = field(default_factory=list)
    """When, after its return."""
    nodes: list[tuple[float, str]] = field(default_factory=list)
    """The same, and of which node."""
    back: int = 0
    """Watches that are open."""

    def ask(self) -> None:
        """Raises ApiError while it is away."""
        now = asyncio.get_running_loop().time()
        if now < self.seconds:
            raise ApiError("cannot connect", kind=ErrorKind.UNREACHABLE)
        self.asked.append(now - self.seconds)
        task = asyncio.current_task()
        self.nodes.append((now - self.seconds, task.get_name() if task else ""))

    async def list_(self) -> str:
        self.ask()
        return "7"

    @asynccontextmanager
    async def watch(
        self, _request: Request[Any], _version: str, _seconds: float
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """As `Api.watch`: nothing happens in it."""
        self.ask()
        self.back += 1
        yield _nothing()


async def _nothing() -> AsyncIterator[WatchEvent]:
    await asyncio.Event().wait()
    yield WatchEvent("BOOKMARK", "7", None)


def outage(nodes: int, seconds: float) -> Outage:
    """What the watches of so many nodes ask after an API server was away for so long."""
    found = Outage(seconds)

    async def play() -> None:
        api, watch = cast("Api", found), Request("watch", "Node", ThisNode)
        tasks = [
            asyncio.create_task(_follow(api, watch, list_), name=f"{node}")
            for node in range(nodes)
            for list_ in (found.list_, None)  # slices, and the Node
        ]
        await asyncio.sleep(seconds + PATIENCE)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(play())
    assert found.back == 2 * nodes, f"{found.back} watches are open"
    return found


def _follow(api: Api, watch: Request[Any], list_: Any) -> Coroutine[Any, Any, None]:
    hooks = follow.WatchHooks(
        list_=list_, see=lambda _: None, opened=lambda: None, failed=lambda *_: None
    )
    return follow.follow(api, watch, hooks, follow.WatchTiming(shortest=10**6, longest=10**6))


def run(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, in counted time."""
    loop = CountedTime()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


def main() -> None:
    """Prints them as a table in Markdown."""
    random.seed(1)
    print(HEADER)
    for nodes in (5_000, 50_000):
        for seconds in (10.0, 60.0, 300.0, 3600.0):
            found = outage(nodes, seconds)
            what = f"{nodes} nodes, {seconds:g} s: requests a second, most in 1 s / in 10 s"
            rates = f"{peak(found.asked, 1.0)} / {peak(found.asked, 10.0) / 10:.0f}"
            print(Figure(what, rates), flush=True)
            late = [one for one in found.nodes if one[0] >= 20.0]
            what = f"{nodes} nodes, {seconds:g} s: nodes that ask from 20 s on, most in 1 s"
            print(Figure(what, f"{most_nodes(late)}", f"<= {nodes / 50:g}"), flush=True)
            print(
                Figure(f"{nodes} nodes, {seconds:g} s: all back after", f"{max(found.asked):.0f} s")
            )


if __name__ == "__main__":
    main()
