"""Records the timeline of what happened on this node, from the feeds of the agent's parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from npu_agent.core import changes
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.timeline import Timeline, TimelineEntry
from npu_agent.core.trends import TrendKind, Trends
from npu_agent.feed import Feed, changes_of

_SETTLE = 10.0
"""Seconds after the start without entries for Pods with a card: the kubelet's first
answer names Pods that held theirs before."""

Source = tuple[Feed[Any], Callable[[Any, Any], Iterable[TimelineEntry]]]


class Recorder:
    """Records what happens while it runs. `timeline` is what it knows."""

    def __init__(
        self,
        version: str,
        hardware: Feed[Snapshot],
        trends: Feed[Trends],
        usages: Feed[tuple[Usage, ...]],
        sources: Sequence[Source],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeline = Timeline()
        self._version = version
        self._hardware = hardware
        self._trends = trends
        self._usages = usages
        self._sources = sources
        self._clock = clock

    async def run(self) -> None:
        started = self._clock()
        first = TimelineEntry("agent", "plain", f"npu-agent {self._version} started")
        self.timeline = self.timeline.noted([first], started)
        hardware, usages = Snapshot(), self._usages.value
        values = {feed: feed.value for feed, _ in self._sources}
        async for _ in changes_of(self._hardware, self._usages, *values):
            now, before, used = self._clock(), hardware, usages
            hardware, usages = self._hardware.value, self._usages.value
            cards = tuple(changes.card_changes(before, hardware))
            new = [*changes.card_entries(changes.without_flapping(cards, self._trends.value))]
            if now - started > _SETTLE:
                flapping = self._trends.value.of(TrendKind.FLAPPING)
                given = changes.usage_entries(used, usages, before, hardware)
                new += (entry for entry in given if entry.card not in flapping)
            for feed, entries in self._sources:
                new += entries(values[feed], feed.value)
                values[feed] = feed.value
            if new:
                self.timeline = self.timeline.noted(new, now)
            if hardware is not before:
                kinds = (changes.ChangeKind.REMOVED, changes.ChangeKind.EXCHANGED)
                left = [change.before or change.card for change in cards if change.kind in kinds]
                self.timeline = self.timeline.left(left, hardware.cards, now)
