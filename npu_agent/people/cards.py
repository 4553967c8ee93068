"""Reads the cards of a host once, for commands that need no running agent.

They are judged as the agent judges them: `read_once` by the same probes and policy, and `as_agent`
has its rules find what one reading shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import replace

from npu_agent import __version__
from npu_agent.core import comparison
from npu_agent.core.counts import Histogram
from npu_agent.core.hardware import CardState, Health, HealthState, Reading, Snapshot
from npu_agent.core.health import Policy, Verdict, with_heat
from npu_agent.core.state import AgentState, ConfigState
from npu_agent.core.trends import Trend, TrendKind, Trends, step
from npu_agent.core.vendor import Vendor
from npu_agent.feed import Feed
from npu_agent.inventory.card import ProbeSettings
from npu_agent.inventory.inventory import Inventory

_LONGEST = 4.0
"""Seconds to wait for the cards, and again for their load."""
_DEFAULT = Policy()


async def read_once(
    vendor: Vendor, *, load: bool = False, settings: ProbeSettings | None = None
) -> Snapshot:
    """Returns one complete Snapshot, or after four seconds why there is none.

    The load of a core in use is known from two readings: with `load` it waits for a second one,
    after more than the second in which a driver may count once, or for a third one. Each core
    keeps the load that it had last: cards do not count at the same moments.
    """
    settings = settings or ProbeSettings()
    often = replace(settings, health_interval=0.3, telemetry_interval=1.1)
    inventory = Inventory(vendor, Feed(often))
    snapshot = Snapshot()
    async with asyncio.TaskGroup() as parts:
        running = parts.create_task(inventory.run())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST):
                await inventory.snapshots.until(lambda snapshot: snapshot.complete)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST if load else 0.0):
                async for latest in inventory.snapshots.watch():
                    snapshot = with_loads(latest, snapshot)
                    if has_loads(snapshot):
                        break
        running.cancel()
    snapshot = with_loads(inventory.snapshots.value, snapshot)
    heated = (_with_heat(card, settings.policy) for card in snapshot.cards)
    return replace(snapshot, cards=tuple(heated))


def has_loads(snapshot: Snapshot) -> bool:
    """Whether the load of each core is known whose driver counts cycles."""
    cores = (core for card in snapshot.cards if card.reading for core in card.reading.cores)
    return all(core.utilization is not None for core in cores if core.cycles is not None)


def with_loads(snapshot: Snapshot, other: Snapshot) -> Snapshot:
    """Returns the Snapshot with the loads of another one where it has none."""
    readings = {card.id: card.reading for card in other.cards}

    def completed(card: CardState) -> CardState:
        reading = readings.get(card.id)
        if card.reading is None or reading is None:
            return card
        loads = {core.core: core.utilization for core in reading.cores}
        return replace(card, reading=completed_by(card.reading, loads))

    return replace(snapshot, cards=tuple(map(completed, snapshot.cards)))


def completed_by(reading: Reading, loads: Mapping[int, float | None]) -> Reading:
    """Returns the reading with these loads, by the core's number, where it has none."""
    cores = tuple(
        replace(core, utilization=loads.get(core.core)) if core.utilization is None else core
        for core in reading.cores
    )
    return replace(reading, cores=cores)


def _with_heat(card: CardState, policy: Policy) -> CardState:
    """The card as unhealthy if it is hotter than the config allows: one reading is believed."""
    health = card.health
    verdict = with_heat(
        Verdict(health.state, health.reason, health.cause),
        card.reading.temperature() if card.reading else None,
        None,
        policy,
    )
    if verdict.state is health.state or verdict.state is not HealthState.UNHEALTHY:
        return card
    hot = Health(
        state=verdict.state, reason=verdict.reason, since=health.since, cause=verdict.cause
    )
    return replace(card, health=hot)


def as_agent(snapshot: Snapshot, policy: Policy = _DEFAULT) -> AgentState:
    """Returns the state of an agent that has just read these cards, and serves nothing."""
    now = time.monotonic()
    return AgentState(
        version=__version__,
        node=None,
        hostname="",
        started_at=now,
        now=time.time(),
        monotonic=now,
        snapshot=snapshot,
        config=ConfigState(loaded_at=now),
        stale_after=math.inf,
        trends=at_one_moment(snapshot, policy),
        lag=Histogram(()),
    )


def at_one_moment(snapshot: Snapshot, policy: Policy = _DEFAULT) -> Trends:
    """Returns the trends that one Snapshot shows: heat, limits, and a UUID of two cards."""
    trends = step(Trends(), Snapshot(), snapshot, (), 0.0, policy)
    slow = comparison.slow(snapshot.cards) if policy.slow_after else {}
    limited = {
        (TrendKind.SLOW, card.id): Trend(
            card=replace(card, reading=None), detail=slow[card.id].detail, since=0.0, last=0.0
        )
        for card in snapshot.cards
        if card.id in slow and slow[card.id].limited
    }
    return replace(trends, found={**trends.found, **limited})
