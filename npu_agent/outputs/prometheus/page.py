"""The page of /metrics: the cards, the agent itself and its process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.state import AgentState, stale_after
from npu_agent.core.vendor_spec import MetricSchema
from npu_agent.feed import Feed
from npu_agent.logs import logger
from npu_agent.outputs.prometheus import cards, own, process
from npu_agent.outputs.prometheus.text import Definition, Source

log = logger(__name__)

Made = TypeVar("Made")


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
    """Renders the page when somebody asks for it, at most once a second.

    Rendering 8 cards of 8 cores takes 2 ms; `bench` prints it as `scrape`.
    """

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        holdings: Feed[tuple[Usage, ...]],
        settings: Feed[Settings],
        hostname: str,
        state: Callable[[], AgentState],
        keep: float = 1.0,
    ) -> None:
        """A page that nobody has asked for yet.

        Args:
            snapshots: the hardware.
            holdings: who holds which cores.
            settings: what the config says of the page.
            hostname: the Node's name, for the label.
            state: puts together the state of the agent, with its counters and clock.
            keep: seconds for which a rendered page answers further requests.
        """
        self.failures: Counter[str] = Counter()
        """How often each family could not be rendered and was left out."""
        self._snapshots = snapshots
        self._holdings = holdings
        self._settings = settings
        self._hostname = hostname
        self._state = state
        self._keep = keep
        self._failing: set[str] = set()
        """Families that failed the last time."""
        self._rendered: dict[bool, tuple[float, bytes]] = {}
        """The page as text and as OpenMetrics, and until when it is kept; `time.monotonic`."""

    async def body(self, *, openmetrics: bool) -> bytes:
        """The page in OpenMetrics, or else as text. Reads no hardware and asks nobody."""
        now = time.monotonic()
        until, page = self._rendered.get(openmetrics, (0.0, b""))
        if now >= until:
            page = self._render(now, openmetrics=openmetrics)
            self._rendered[openmetrics] = now + self._keep, page
        return page

    def _render(self, now: float, *, openmetrics: bool) -> bytes:
        settings = self._settings.value
        parts = [
            *self._families(
                "cards",
                cards.definitions(settings.schemas),
                lambda: self._shown(now, settings),
                openmetrics=openmetrics,
            ),
            *self._families("own", own.DEFINITIONS, self._state, openmetrics=openmetrics),
            *self._families(
                "process", process.DEFINITIONS, process.this_process, openmetrics=openmetrics
            ),
        ]
        return b"".join(parts) + (b"# EOF\n" if openmetrics else b"")

    def _shown(self, now: float, settings: Settings) -> cards.Cards:
        """The cards, once all of them were read; without readings that are stale."""
        snapshot = self._snapshots.value
        if not snapshot.complete:
            return ()
        return cards.shown(
            cards.recent(snapshot, now - stale_after(settings.interval)),
            self._holdings.value,
            hostname=self._hostname,
            pod_labels=settings.pod_labels,
        )

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
        if source is None:
            return
        for definition in definitions:
            render = partial(definition.render, source, openmetrics=openmetrics)
            yield self._attempt(definition.name, render) or b""

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
