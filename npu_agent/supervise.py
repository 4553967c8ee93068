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
        since = loop.time()
        try:
            await _to_its_end(asyncio.create_task(run(), name=part))
        except Exception:
            log.exception("a part of the agent failed; restarting it", part=part)
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


async def _to_its_end(running: asyncio.Task[None]) -> None:
    """Waits for a task that only it awaits; cancelling this cancels that, and still waits.

    Libraries cancel the task that waits in them to wake it up, and some never take that back
    (grpclib; before Python 3.13 a TaskGroup of which a task fails while it waits for all): then a
    failure, or the next deadline, would be taken for the agent's end, and the part be gone.
    """
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancelled = True
            running.cancel()
    if cancelled:
        if not running.cancelled() and (error := running.exception()):
            log.debug(
                "a part of the agent failed during shutdown", part=running.get_name(), reason=error
            )
        raise asyncio.CancelledError
    if running.cancelled():
        raise _CancelledByItselfError
    running.result()


class _CancelledByItselfError(Exception):
    pass
