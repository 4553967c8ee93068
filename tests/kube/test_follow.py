"""When a part that follows objects tries again."""

from __future__ import annotations

import asyncio

import pytest

from npu_agent.kube import Api, ApiError, ErrorKind, follow
from npu_agent.kube.node import ThisNode
from npu_agent.kube.request import Request
from tests.until import until


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
    timing = follow.WatchTiming()
    hooks = follow.WatchHooks(
        list_=list_, see=lambda _: None, opened=lambda: None, failed=lambda *_: None
    )
    watch = Request("watch", "Node", ThisNode)
    task = asyncio.create_task(follow.follow(Api(), watch, hooks, timing))
    await until(lambda: len(pauses) == len(kinds))
    task.cancel()
    assert set(pauses[10:15]) == {timing.retry_longest}
    for pause, longest in zip(pauses[15:], (8.0, 16.0, 32.0), strict=True):
        assert pause <= longest
