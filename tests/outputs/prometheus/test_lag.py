"""The lag of the loop, with a clock and a sleep of the test's own."""

import asyncio
import math
import time

import pytest

from npu_agent.outputs.prometheus.lag import LoopLag


async def test_lag_is_how_much_later_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.3
    late = [0.0, -0.001, 0.004, 7.0]
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        asked.append(seconds)
        if len(asked) > len(late):
            raise asyncio.CancelledError
        now += seconds + late[len(asked) - 1]

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    loop_lag = LoopLag()
    with pytest.raises(asyncio.CancelledError):
        await loop_lag.run()
    assert set(asked) == {5.0}  # seldom: an idle agent sleeps
    seconds = loop_lag.seconds
    of = dict(zip((*seconds.bounds, math.inf), seconds.counts, strict=True))
    assert {bound: count for bound, count in of.items() if count} == {
        0.001: 2,
        0.005: 1,
        math.inf: 1,
    }
    assert seconds.total == pytest.approx(7.004)
