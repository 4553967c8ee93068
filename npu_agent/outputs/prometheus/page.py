"""The page of /metrics: bytes that are ready when Prometheus asks, and never half of them."""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.process_collector import ProcessCollector

from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment
from npu_agent.core.vocabulary import MetricSchema
from npu_agent.feed import Feed, changes_of
from npu_agent.kubelet.podresources import Holdings
from npu_agent.logs import logger
from npu_agent.outputs.prometheus import cards, own
from npu_agent.outputs.prometheus.own import Own
from npu_agent.outputs.prometheus.text import Definition, Source, render

log = logger(__name__)

Made = TypeVar("Made")

# As prometheus_client has them, in modules that bring half of it along.
TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Content-Type of `Page.body(openmetrics=False, ...)`."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Content-Type of `Page.body(openmetrics=True, ...)`."""

_AT_LEAST = 0.2
"""Seconds between two renderings of the cards, however often they change."""
_SETTLE = 0.05
"""Seconds from a change to the look at it: cards that are read together are shown together."""
_OWN_FOR = 1.0
"""Seconds for which what the agent says of itself is not made anew."""
_LATE, _LATE_AT_LEAST = 3, 10.0
"""Intervals between readings, and seconds, after which a card's last figures are not shown."""
_SLICE = 1_000
"""Assignments that are looked at between two turns for others."""
_LEVEL = 1
"""Of compression: the page repeats itself so much that more effort gains nothing."""
_GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\x04\xff"
"""RFC 1952: deflate, no name, no time, quickly made, on a system that does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the config says of the page."""

    schemas: tuple[MetricSchema, ...]
    """What key metrics.schema names: each vendor's names and units."""
    pod_labels: bool
    """Key metrics.podLabels."""
    interval: float
    """Key metrics.interval: seconds between two readings of a card."""
    resources: frozenset[str]
    """The names of the agent's resources: whose holders are shown."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What the cards' part of a page is made from."""

    snapshot: Snapshot
    assignments: tuple[Assignment, ...]
    settings: Settings

    def makes_the_same_as(self, other: _Subject | None) -> bool:
        """Whether the part would be the same; not by a look at each of maybe many assignments."""
        return (
            other is not None
            and self.assignments is other.assignments
            and self.settings == other.settings
            and self.snapshot == other.snapshot
        )


class Page:
    """Keeps the page: the cards' part rendered on change, the agent's own when it is asked for.

    The cards' part is text in which both formats agree, as it holds gauges only.
    """

    def __init__(
        self,
        *,
        snapshots: Feed[Snapshot],
        holdings: Feed[Holdings],
        settings: Feed[Settings],
        hostname: str,
        own: Callable[[], Own],
    ) -> None:
        """A page without cards, until it runs.

        Args:
            snapshots: the cards.
            holdings: who holds what.
            settings: what the config says of the page.
            hostname: the Node's name, for the label of that name.
            own: gathers what the agent says of itself; asked once a second at most.
        """
        self.failures: Counter[str] = Counter()
        """How often each family could not be made, and was left out."""
        self._snapshots = snapshots
        self._holdings = holdings
        self._settings = settings
        self._hostname = hostname
        self._gather = own
        self._process = ProcessCollector(registry=None)
        self._failing: set[str] = set()
        """Families that failed last time, which the log knows of."""
        self._subject: _Subject | None = None
        self._aged: Feed[float] = Feed(0.0)
        """Until when readings were recent enough, at the last time that some ceased to be so."""
        self._ageing: asyncio.TimerHandle | None = None
        self._cards = b""
        self._packed: tuple[bytes, int] | None = None
        """The cards' part as `_deflated`, and its CRC; None until somebody asks for it."""
        self._own: dict[bool, tuple[float, bytes]] = {}
        """The own part as text and as OpenMetrics, and until when it is good."""

    async def run(self) -> None:
        """Renders on change until cancelled."""
        feeds = (self._snapshots, self._holdings, self._settings, self._aged)
        async for _ in changes_of(*feeds):
            await asyncio.sleep(_SETTLE)
            subject = self._now()
            if subject is not None and not subject.makes_the_same_as(self._subject):
                await self._render(subject)
                self._subject = subject
                await asyncio.sleep(_AT_LEAST)

    def body(self, *, openmetrics: bool, gzip: bool) -> bytes:
        """The page as it is now, in OpenMetrics or else as text; with `gzip` compressed by it.

        Takes no look at hardware and no question to anybody.
        """
        own = self._own_part(openmetrics=openmetrics)
        if not gzip:
            return self._cards + own
        if self._packed is None:
            self._packed = _deflated(self._cards, zlib.Z_FULL_FLUSH), zlib.crc32(self._cards)
        packed, crc = self._packed
        # One gzip member of two runs of blocks: some readers, browsers among them, take the first
        # of several members for the whole.
        size = (len(self._cards) + len(own)) & 0xFFFF_FFFF
        trailer = struct.pack("<LL", zlib.crc32(own, crc), size)
        return _GZIP_HEADER + packed + _deflated(own, zlib.Z_FINISH) + trailer

    def _now(self) -> _Subject | None:
        """What there is to show; None before the first look at the cards is complete."""
        snapshot, settings = self._snapshots.value, self._settings.value
        if not snapshot.complete:
            return None
        late = max(_LATE_AT_LEAST, _LATE * settings.interval)
        since = time.monotonic() - late
        snapshot = cards.recent(snapshot, since)
        self._look_again_at(
            min((s.reading.at + late for s in snapshot.cards if s.reading), default=None)
        )
        return _Subject(snapshot, self._holdings.value.assignments, settings)

    def _look_again_at(self, moment: float | None) -> None:
        """Has the page made anew when the oldest reading will have become too old to be shown."""
        if self._ageing:
            self._ageing.cancel()
        self._ageing = None
        if moment is not None:
            delay = max(0.0, moment - time.monotonic()) + 0.01
            loop = asyncio.get_running_loop()
            self._ageing = loop.call_later(delay, self._aged.publish, moment)

    async def _render(self, subject: _Subject) -> None:
        """Makes the cards' part, family by family with a turn for others between, then shows it."""
        settings = subject.settings
        ours: list[Assignment] = []
        for at in range(0, len(subject.assignments), _SLICE):
            some = subject.assignments[at : at + _SLICE]
            ours += [one for one in some if one.resource in settings.resources]
            await asyncio.sleep(0)
        shown = self._attempt(
            "cards",
            lambda: cards.shown(
                subject.snapshot,
                ours,
                hostname=self._hostname,
                pod_labels=settings.pod_labels,
                resources=settings.resources,
            ),
        )
        parts = []
        for definition in cards.definitions(settings.schemas):
            await asyncio.sleep(0)
            parts.append(self._family(definition, shown or (), openmetrics=False))
        self._cards = b"".join(parts)
        self._packed = None

    def _own_part(self, *, openmetrics: bool) -> bytes:
        until, part = self._own.get(openmetrics, (0.0, b""))
        now = time.monotonic()
        if now >= until:
            part = self._render_own(openmetrics=openmetrics)
            self._own[openmetrics] = now + _OWN_FOR, part
        return part

    def _render_own(self, *, openmetrics: bool) -> bytes:
        parts: list[bytes | None] = []
        gathered = self._attempt("own", self._gather)
        if gathered is not None:
            parts += [
                self._family(definition, gathered, openmetrics=openmetrics)
                for definition in own.DEFINITIONS
            ]
        parts.append(self._attempt("process", lambda: self._render_process(openmetrics)))
        parts.append(b"# EOF\n" if openmetrics else b"")
        return b"".join(filter(None, parts))

    def _render_process(self, openmetrics: bool) -> bytes:
        return b"".join(
            render(metric, openmetrics=openmetrics) for metric in self._process.collect()
        )

    def _family(
        self, definition: Definition[Source], source: Source, *, openmetrics: bool
    ) -> bytes:
        """A family's part of the page; empty where it has no samples, or cannot be made."""

        def make() -> bytes:
            return render(definition.metric(source), openmetrics=openmetrics)

        return self._attempt(definition.name, make) or b""

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


def _deflated(data: bytes, ending: int) -> bytes:
    """Blocks of raw deflate (RFC 1951), which end on a byte and refer to nothing before them."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush(ending)
