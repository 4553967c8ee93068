"""Turns: when long work lets others go on."""

import asyncio

import pytest

from npu_agent import ticks
from npu_agent.ticks import Turns


@pytest.mark.parametrize(("turn", "others"), [(3600.0, 0), (0.0, 1)])
async def test_only_long_work_lets_others_go_on(
    turn: float, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks, "_TURN", turn)
    ran: list[None] = []
    asyncio.get_running_loop().call_soon(ran.append, None)
    await Turns().take()
    assert len(ran) == others
