"""Keeps a part of the agent running: what fails is logged with its cause and comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from npu_agent.backoff import Backoff
from npu_agent.logs import logger

log = logger(__name__)

_STEADY = 60.0
"""Seconds a part has to run before its next failure counts as the first one again."""


async def keep_running(
    part: str, run: Callable[[], Awaitable[None]], restarts: Counter[str] | None = None
) -> None:
    """Runs `run` until cancelled, again whenever it fails or ends; counts that in `restarts`.

    The one place where any exception is caught: a fault in one part takes no other part down.
    """
    pause = Backoff(first=0.2, longest=30.0)
    loop = asyncio.get_running_loop()
    this = asyncio.current_task()
    while True:
        since = loop.time()
        try:
            await run()
        except Exception:
            log.exception("a part failed and will be started again", part=part)
        else:
            log.error("a part ended and will be started again", part=part)
        if this is not None and this.cancelling():
            # It failed, or just went on, while it was cancelled: it ends all the same.
            raise asyncio.CancelledError
        if restarts is not None:
            restarts[part] += 1
        if loop.time() - since > _STEADY:
            pause.reset()
        await asyncio.sleep(pause.next())
