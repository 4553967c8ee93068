"""Runs all checks of the report, by subject."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from npu_agent.kube import ApiError
from npu_agent.logs import logger
from npu_agent.people.doctor import agent, cluster, directories, dra, host, kubelet, sockets
from npu_agent.people.doctor.causes import with_causes
from npu_agent.people.doctor.check import CONFIGURATION, Check, Lines, Unknown, unknown
from npu_agent.people.doctor.context import Context

log = logger(__name__)

SUBJECTS: tuple[tuple[str, Callable[[Context], Lines]], ...] = (
    (CONFIGURATION, cluster.rights),
    (CONFIGURATION, sockets.user),
    ("Hardware", host.lines),
    ("Kubelet", sockets.lines),
    ("Kubelet", kubelet.lines),
    ("Kubelet", directories.lines),
    ("Metrics and readiness", agent.lines),
    ("Cluster", cluster.lines),
    ("DRA", dra.lines),
)
"""In the order in which people read and fix what is wrong."""


async def examine(context: Context) -> tuple[Check, ...]:
    """Every line but the one on the configuration. No subject waits for another."""
    fresh = replace(context)  # with nothing probed yet
    found = await asyncio.gather(*(run(section, lines(fresh)) for section, lines in SUBJECTS))
    return with_causes(check for subject in found for check in subject)


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
    return [await each for each in running]


async def _checked(section: str, name: str, check: Check | Coroutine[Any, Any, Check]) -> Check:
    try:
        found = check if isinstance(check, Check) else await check
    except Unknown as error:
        found = error.check
    except ApiError as error:
        found = unknown(error.what)
    except Exception as error:  # as above
        found = _fault(error)
    return replace(found, name=name, section=section)


async def no_node(context: Context) -> bool:
    """Whether this host has nothing to do with NPUs and Kubernetes, such as a laptop."""
    fresh = replace(context)
    if fresh.in_pod:
        return False
    try:
        return not (
            (await fresh.probe(sockets.plugin_directory)).there
            or await fresh.probe(host.any_sign_of_cards)
            or await fresh.probe(sockets.owner) is not None
        )
    except Unknown:
        return False


def _fault(error: Exception) -> Check:
    log.debug("a check failed", exc_info=error)
    return unknown(f"internal error: {error!r}")
