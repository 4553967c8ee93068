"""All probes together, then what they mean: no subject waits for another, or fails with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields
from typing import TypeVar

from npu_agent.doctor import cluster, host, kubelet, places, privileges, serving
from npu_agent.doctor.check import Check, State, Unseen
from npu_agent.doctor.situation import Situation
from npu_agent.kubelet.ownership import Owner
from npu_agent.logs import logger

log = logger(__name__)

T = TypeVar("T")

_LONGEST = 45.0
"""Seconds for the probes of one subject, each of which has its own deadline, far shorter."""


async def examine(situation: Situation) -> tuple[Check, ...]:
    """Every line but the one on the configuration, in the order in which people read them."""
    hardware, local, dirs, port, powers, remote = await asyncio.gather(
        _within(host.hardware(situation)),
        _within(kubelet.kubelet(situation)),
        _within(places.places(situation)),
        _within(serving.serving(situation)),
        _within(privileges.privileges(situation)),
        _within(cluster.cluster(situation)),
    )
    seen = _filled(host.Hardware, hardware)
    node = _filled(kubelet.Kubelet, local)
    directories = _filled(places.Places, dirs)
    owner = node.owner if isinstance(node.owner, Owner) else None
    api = _filled(cluster.Cluster, remote)
    subjects: dict[str, Callable[[], Iterator[Check]]] = {
        "privileges": lambda: privileges.checks(situation, powers, node.directory),
        "hardware": lambda: host.checks(situation, seen),
        "kubelet": lambda: kubelet.checks(situation, node, seen.snapshot),
        "directories": lambda: places.checks(situation, directories),
        "metrics": lambda: serving.checks(situation, port, owner),
        "cluster": lambda: cluster.checks(situation, api, node, seen.snapshot, directories),
    }
    return tuple(check for name, judge in subjects.items() for check in _judged(name, judge))


async def _within(probing: Awaitable[T | Unseen]) -> T | Unseen:
    """What the probes of a subject see; a fault of our own is a line, and no traceback."""
    try:
        async with asyncio.timeout(_LONGEST):
            return await probing
    except TimeoutError:
        return Unseen(f"no answer within {_LONGEST:g} s")
    except Exception as error:  # the edge: the other subjects go on
        log.debug("a probe failed", exc_info=True)
        return Unseen(f"internal error: {error!r}")


def _filled(cls: type[T], found: T | Unseen) -> T:
    """What was found; if that is nothing, a `cls` whose every field is Unseen."""
    if isinstance(found, Unseen):
        return cls(**{field.name: found for field in fields(cls)})  # type: ignore[arg-type]
    return found


def _judged(name: str, judge: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    try:
        found.extend(judge())
    except Exception as error:  # as above; the lines before it stay
        log.debug("a check failed", exc_info=True)
        found.append(Check(name, State.UNKNOWN, f"internal error: {error!r}"))
    return found
