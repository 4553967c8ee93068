"""A program in a network of its own: prints how a watch ends whose peer has vanished."""

from __future__ import annotations

import asyncio
import subprocess

from npu_agent.kube import Api, ApiError, ApiTiming
from npu_agent.kube.credentials import at
from npu_agent.kube.request import Request
from npu_agent.people.simulator.apiserver import served
from tests.kube.helpers import SLICE, hangs
from tests.kube.test_watch import line, streams

WATCH = Request("watch", "Node", dict)


def loopback(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


async def main() -> None:
    loopback("up")
    async with (
        served(streams(line("ADDED", SLICE), then=hangs)) as url,
        Api(lambda: at(url, "a test"), timing=ApiTiming(silence=2)) as api,
        api.watch(WATCH, "1", 60) as events,
    ):
        await anext(events)
        loopback("down")
        try:
            await anext(events)
        except ApiError as error:
            print(error.kind.name)


if __name__ == "__main__":
    asyncio.run(main())
