"""Reads the cards of a host once, and what that shows, for commands that need no running agent."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from npu_agent.core import comparison
from npu_agent.core.hardware import Snapshot
from npu_agent.core.trends import Trend, TrendKind, Trends, step
from npu_agent.core.vendor import Vendor
from npu_agent.feed import Feed
from npu_agent.inventory.card import ProbeSettings
from npu_agent.inventory.inventory import Inventory

_LONGEST = 4.0
"""Seconds to wait for the cards, and again for their load."""


async def read_once(
    vendor: Vendor, *, load: bool = False, settings: ProbeSettings | None = None
) -> Snapshot:
    """Returns one complete Snapshot, or after four seconds why there is none.

    The load of a core in use is known from two readings: with `load` it waits for a second one,
    after more than the second in which a driver may count once, or for a third one.
    """
    often = replace(settings or ProbeSettings(), health_interval=0.3, telemetry_interval=1.1)
    inventory = Inventory(vendor, Feed(often))
    async with asyncio.TaskGroup() as parts:
        running = parts.create_task(inventory.run())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST):
                await inventory.snapshots.until(lambda snapshot: snapshot.complete)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST if load else 0.0):
                await inventory.snapshots.until(has_loads)
        running.cancel()
    return inventory.snapshots.value


def has_loads(snapshot: Snapshot) -> bool:
    """Whether the load of each core is known whose driver counts cycles."""
    cores = (core for card in snapshot.cards if card.reading for core in card.reading.cores)
    return all(core.utilization is not None for core in cores if core.cycles is not None)


def at_one_moment(snapshot: Snapshot) -> Trends:
    """Returns the trends that one Snapshot shows: heat, limits, and a UUID of two cards."""
    trends = step(Trends(), Snapshot(), snapshot, (), 0.0)
    slow = comparison.slow(snapshot.cards)
    limited = {
        (TrendKind.SLOW, card.id): Trend(
            card=replace(card, reading=None), detail=slow[card.id].detail, since=0.0, last=0.0
        )
        for card in snapshot.cards
        if card.id in slow and slow[card.id].limited
    }
    return replace(trends, found={**trends.found, **limited})
