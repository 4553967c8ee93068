"""The page of /metrics: the cards' part is rendered on change, the agent's own part on request."""

from __future__ import annotations

import asyncio
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Holding
from npu_agent.core.state import AgentState, stale_after
from npu_agent.core.vocabulary import MetricSchema
from npu_agent.feed import Feed, changes_of
from npu_agent.logs import logger
from npu_agent.outputs.prometheus import cards, own, process
from npu_agent.outputs.prometheus.text import Definition, Source

log = logger(__name__)

Made = TypeVar("Made")

_ASKED_FOR = 150.0
"""Seconds after a request in which the cards' part is rendered as soon as something changes, so
that the next scrape finds it ready. Longer than any usual scrape interval; without a scraper
nothing is rendered."""
_AT_LEAST = 1.0
"""Seconds between two renderings of the cards, however often they change."""
_OWN_FOR = 1.0
"""Seconds for which the agent's own part is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the config says of the page."""

    schemas: tuple[MetricSchema, ...]
    """What key metrics.schema names: each vendor's names and units."""
    pod_labels: bool
    """Key metrics.podLabels."""
    interval: float
    """Key metrics.interval: seconds between two readings of a card."""


class Page:
    """Keeps the page. The cards' part reads the same in both formats, as it holds gauges only."""

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        holdings: Feed[tuple[Holding, ...]],
        settings: Feed[Settings],
        hostname: str,
        state: Callable[[], AgentState],
    ) -> None:
        """A page that is empty until somebody asks for it.

        Args:
            snapshots: the hardware.
            holdings: who holds which cores.
            settings: what the config says of the page.
            hostname: the Node's name, for the label.
            state: puts together the state of the agent, with its counters and clock.
        """
        self.failures: Counter[str] = Counter()
        """How often each family could not be rendered and was left out."""
        self._snapshots = snapshots
        self._holdings = holdings
        self._settings = settings
        self._hostname = hostname
        self._state = state
        self._failing: set[str] = set()
        """Families that failed the last time."""
        self._asked = asyncio.Event()
        self._asked_at = -math.inf
        self._behind = True
        """Whether there may be changes that nobody has rendered."""
        self._rendering = asyncio.Lock()
        self._rendered: tuple[object, ...] = ()
        """The values of the feeds that the cards' part was rendered from."""
        self._stale_at = math.inf
        """When the first of the readings in the cards' part becomes stale; `time.monotonic`."""
        self._cards = b""
        self._own: dict[bool, tuple[float, bytes]] = {}
        """The own part as text and as OpenMetrics, and until when it is kept."""

    async def run(self) -> None:
        """Renders on change, as long as somebody asks for the page now and then."""
        due = 0.0
        async for _ in changes_of(self._snapshots, self._holdings, self._settings):
            if time.monotonic() - self._asked_at > _ASKED_FOR:
                self._behind = True
                self._asked.clear()
                await self._asked.wait()
            if (pause := due - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            if await self._render():
                due = time.monotonic() + _AT_LEAST

    async def body(self, *, openmetrics: bool) -> bytes:
        """The present page, in OpenMetrics or else as text.

        Reads no hardware and asks nobody; the first request for a long time renders.
        """
        self._asked_at = time.monotonic()
        self._asked.set()
        if self._behind or self._asked_at >= self._stale_at:
            await self._render()
        return self._cards + self._own_part(openmetrics=openmetrics)

    async def _render(self) -> bool:
        """Brings the cards' part up to date; returns whether it was not."""
        async with self._rendering:
            present = self._snapshots.value, self._holdings.value, self._settings.value
            snapshot, holdings, settings = present
            now = time.monotonic()
            # By identity: a feed keeps its value while an equal one is published.
            same = self._rendered and all(map(operator.is_, present, self._rendered))
            if (same and now < self._stale_at) or not snapshot.complete:
                self._behind = not snapshot.complete
                return False
            late = stale_after(settings.interval)
            snapshot = cards.recent(snapshot, now - late)
            shown = self._attempt(
                "cards",
                lambda: cards.shown(
                    snapshot, holdings, hostname=self._hostname, pod_labels=settings.pod_labels
                ),
            )
            self._cards = b"".join(
                self._family(definition, shown or (), openmetrics=False)
                for definition in cards.definitions(settings.schemas)
            )
            self._rendered, self._behind = present, False
            read = (state.reading.at + late for state in snapshot.cards if state.reading)
            self._stale_at = min(read, default=math.inf)
            return True

    def _own_part(self, *, openmetrics: bool) -> bytes:
        until, part = self._own.get(openmetrics, (0.0, b""))
        now = time.monotonic()
        if now >= until:
            part = self._render_own(openmetrics=openmetrics)
            self._own[openmetrics] = now + _OWN_FOR, part
        return part

    def _render_own(self, *, openmetrics: bool) -> bytes:
        parts = [
            *self._families("own", own.DEFINITIONS, self._state, openmetrics=openmetrics),
            *self._families(
                "process", process.DEFINITIONS, process.this_process, openmetrics=openmetrics
            ),
        ]
        return b"".join(parts) + (b"# EOF\n" if openmetrics else b"")

    def _families(
        self,
        name: str,
        definitions: Iterable[Definition[Source]],
        read: Callable[[], Source],
        *,
        openmetrics: bool,
    ) -> Iterator[bytes]:
        """The parts of families that have one source; none if that cannot be read."""
        source = self._attempt(name, read)
        if source is not None:
            for definition in definitions:
                yield self._family(definition, source, openmetrics=openmetrics)

    def _family(
        self, definition: Definition[Source], source: Source, *, openmetrics: bool
    ) -> bytes:
        """A family's part of the page; empty where it has no samples, or cannot be made."""
        made = self._attempt(
            definition.name, lambda: definition.render(source, openmetrics=openmetrics)
        )
        return made or b""

    def _attempt(self, name: str, make: Callable[[], Made]) -> Made | None:
        """What `make` returns; None if it fails, which is counted and, at the first time, logged.

        One odd value costs its family and never the page, so any exception is caught.
        """
        try:
            made = make()
        except Exception:
            self.failures[name] += 1
            if name not in self._failing:
                self._failing.add(name)
                log.exception("a part of the metrics page is left out", family=name)
            return None
        self._failing.discard(name)
        return made
