"""Runs all checks of the report, by subject."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from npu_agent.kube import ApiError
from npu_agent.logs import logger
from npu_agent.people.doctor import agent, cluster, dra, host, kubelet
from npu_agent.people.doctor.check import Check, Lines, Unknown, unknown
from npu_agent.people.doctor.context import Context

log = logger(__name__)

SUBJECTS: tuple[tuple[str, Callable[[Context], Lines]], ...] = (
    ("Running agent", agent.lines),
    ("Hardware", host.lines),
    ("Kubelet", kubelet.lines),
    ("Cluster", cluster.lines),
    ("DRA", dra.lines),
)
"""What the agent reports comes first; then in the order in which people fix what is wrong."""


async def examine(context: Context) -> tuple[Check, ...]:
    """Every line but the one on the configuration. No subject waits for another."""
    fresh = replace(context)  # with nothing probed yet
    subjects = await asyncio.gather(*(run(section, lines(fresh)) for section, lines in SUBJECTS))
    return tuple(check for subject in subjects for check in subject)


async def run(section: str, lines: Lines) -> list[Check]:
    """Runs all checks of a subject at the same time.

    A fault of our own is a line; the other lines stay. Where `lines` itself ends with Unknown or
    ApiError, another line has said so.
    """
    running: list[asyncio.Task[Check]] = []
    try:
        async for name, check in lines:
            running.append(asyncio.create_task(_checked(section, name, check)))
    except (Unknown, ApiError):
        pass
    except Exception as error:  # the edge: the other subjects go on
        running.append(asyncio.create_task(_checked(section, section, _fault(error))))
    return [await task for task in running]


async def _checked(section: str, name: str, check: Check | Coroutine[Any, Any, Check]) -> Check:
    try:
        line = check if isinstance(check, Check) else await check
    except Unknown as error:
        line = error.check
    except ApiError as error:
        line = unknown(error.what)
    except Exception as error:  # as above
        line = _fault(error)
    return replace(line, name=name, section=section)


def _fault(error: Exception) -> Check:
    log.debug("a check failed", exc_info=error)
    return unknown(f"internal error: {error!r}")
