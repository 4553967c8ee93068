"""Keeps the timeline of what happened on this node, from the feeds of those to whom it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from npu_agent.core import changes
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.state import ConfigState, LabelState, SessionStatus
from npu_agent.core.timeline import Subject, Timeline, TimelineEntry
from npu_agent.feed import Feed, changes_of

_SETTLE = 10.0
"""Seconds after the start in which nobody is noted to be given a card: the kubelet is asked who
holds what, and those have held it before."""


class Chronicle:
    """Notes what happens while it runs. `timeline` is what it knows."""

    def __init__(
        self,
        *,
        version: str,
        hardware: Feed[Snapshot],
        snapshots: Feed[Snapshot],
        configs: Feed[ConfigState],
        sessions: Sequence[Feed[SessionStatus]],
        drivers: Sequence[Feed[SessionStatus]],
        holdings: Feed[tuple[Usage, ...]],
        labels: Feed[LabelState] | None,
        clock: Callable[[], float] = time.monotonic,
        settle: float = _SETTLE,
    ) -> None:
        """Follows all these once it runs; `hardware` changes without readings only."""
        self.timeline = Timeline()
        self._version = version
        self._hardware = hardware
        self._errors = snapshots.map(changes.errors_of)
        self._configs = configs
        self._sessions: tuple[tuple[Subject, Feed[SessionStatus]], ...] = (
            *(("resource", feed) for feed in sessions),
            *(("dra", feed) for feed in drivers),
        )
        self._holdings = holdings
        self._labels = labels
        self._clock = clock
        self._settle = settle

    async def run(self) -> None:
        """Follows them until cancelled."""
        started = self._clock()
        first = TimelineEntry(
            subject="agent", tone="plain", text=f"npu-agent {self._version} started"
        )
        self.timeline = self.timeline.noted([first], started)
        hardware, errors, holdings = Snapshot(), self._errors.value, self._holdings.value
        config, labels = self._configs.value, self._labels.value if self._labels else None
        statuses = [feed.value for _, feed in self._sessions]
        feeds: list[Feed[Any]] = [self._hardware, self._errors, self._configs, self._holdings]
        feeds += [feed for _, feed in self._sessions]
        async for _ in changes_of(*feeds, *([self._labels] if self._labels else [])):
            before, now = hardware, self._clock()
            hardware = self._hardware.value
            cards = tuple(changes.card_changes(before, hardware))
            found = [*changes.card_entries(cards)]
            found += changes.error_entries(errors, errors := self._errors.value)
            found += changes.config_entries(config, config := self._configs.value)
            for at, (subject, feed) in enumerate(self._sessions):
                found += changes.session_entries(statuses[at], feed.value, subject)
                statuses[at] = feed.value
            held, holdings = holdings, self._holdings.value
            if now - started > self._settle:
                found += changes.usage_entries(held, holdings, before, hardware)
            if self._labels:
                found += changes.label_entries(labels, labels := self._labels.value)
            if found:
                self.timeline = self.timeline.noted(found, now)
            if hardware is not before:
                left = [one.card for one in cards if one.kind is changes.ChangeKind.REMOVED]
                self.timeline = self.timeline.left(left, hardware.cards, now)
