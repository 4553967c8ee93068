"""Keeps a part of the agent running: logs a failure with its cause, and restarts it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from npu_agent.backoff import Backoff
from npu_agent.logs import logger

log = logger(__name__)


async def keep_running(
    part: str,
    run: Callable[[], Coroutine[Any, Any, None]],
    restarts: Counter[str],
    *,
    steady: float = 60.0,
) -> None:
    """Runs `run` until cancelled, again whenever it fails or ends; counts that in `restarts`.

    After `steady` seconds without a failure the next one counts as the first again.

    A fault in one part takes no other part down.
    """
    pause = Backoff(first=0.2, longest=30.0, least=0.1)
    loop = asyncio.get_running_loop()
    while True:
        since, failure = loop.time(), None
        try:
            await run()
        except (Exception, asyncio.CancelledError) as error:
            failure = error
        task = asyncio.current_task()
        if task and task.cancelling():  # the agent ends
            raise asyncio.CancelledError from failure
        if failure:
            log.error("a part of the agent failed; restarting it", part=part, exc_info=failure)
        else:
            log.error("a part of the agent ended; restarting it", part=part)
        restarts[part] += 1
        if loop.time() - since > steady:
            pause.reset()
        await asyncio.sleep(pause.next())


@asynccontextmanager
async def background(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in parts]
        yield
        for task in tasks:
            task.cancel()
