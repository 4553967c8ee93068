"""The lag of the loop."""

import asyncio
import time

import pytest

from npu_agent.outputs.prometheus.lag import LoopLag


async def test_lag_is_how_much_later_it_is_woken() -> None:
    lag = LoopLag(interval=0.05)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(0.15)  # noqa: ASYNC251 (it blocks the loop on purpose)
    async with asyncio.timeout(20):
        while not lag.seconds.total:
            await asyncio.sleep(0.01)
    task.cancel()
    assert lag.seconds.total == pytest.approx(0.1, abs=0.09)
    assert sum(lag.seconds.counts) == 1
