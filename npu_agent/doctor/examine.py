"""All the looks at once, then what they mean: no look waits for another, or fails with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from npu_agent.doctor import cluster, host, kubelet, places, privileges, serving
from npu_agent.doctor.check import Check, State, Unseen
from npu_agent.doctor.situation import Situation
from npu_agent.logs import logger

log = logger(__name__)

T = TypeVar("T")

_LONGEST = 45.0
"""Seconds for the looks of one room, each of which has a deadline of its own, far shorter."""


async def examine(situation: Situation) -> tuple[Check, ...]:
    """Every line but the one on the configuration, in the order in which people read them."""
    hardware, local, dirs, port, powers, remote = await asyncio.gather(
        _within(host.hardware(situation), host.unseen),
        _within(kubelet.kubelet(situation), kubelet.unseen),
        _within(places.places(situation), places.unseen),
        _within(serving.serving(situation), _itself),
        _within(privileges.privileges(situation), _itself),
        _within(cluster.cluster(situation), lambda why: cluster.unseen(situation, why)),
    )
    owner = local.owner if isinstance(local.owner, str) else None
    rooms: dict[str, Callable[[], Iterator[Check]]] = {
        "privileges": lambda: privileges.checks(situation, powers, local.directory),
        "hardware": lambda: host.checks(situation, hardware),
        "kubelet": lambda: kubelet.checks(situation, local, hardware.snapshot),
        "directories": lambda: places.checks(situation, dirs),
        "metrics": lambda: serving.checks(situation, port, owner),
        "cluster": lambda: cluster.checks(situation, remote, local, hardware.snapshot, dirs),
    }
    return tuple(check for name, tell in rooms.items() for check in _told(name, tell))


def _itself(why: Unseen) -> Unseen:
    return why


async def _within(looking: Awaitable[T], unseen: Callable[[Unseen], T]) -> T:
    """What a room saw, or that it saw nothing: a fault of ours is a line, and no traceback."""
    try:
        async with asyncio.timeout(_LONGEST):
            return await looking
    except TimeoutError:
        return unseen(Unseen(f"no answer within {_LONGEST:g} s"))
    except Exception as error:  # the edge: the other rooms go on
        log.debug("a look failed", exc_info=True)
        return unseen(Unseen(f"internal error: {error!r}"))


def _told(name: str, tell: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    try:
        found.extend(tell())
    except Exception as error:  # as above; what was told before it stays
        log.debug("a look cannot be told of", exc_info=True)
        found.append(Check(name, State.UNKNOWN, f"internal error: {error!r}"))
    return found
