"""What the templates of the status page ask, in addition to the state. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from npu_agent.core.hardware import CardState, HealthState, Reading
from npu_agent.core.kinds import Problem
from npu_agent.core.ledger import Assignment, PreparedClaim, PreparedDevice, Usage, card_of
from npu_agent.core.offer import Device
from npu_agent.core.problems import notes, problems
from npu_agent.core.problems.cards import is_hot
from npu_agent.core.state import AgentState, GoneDevice, SessionPhase, is_fenced
from npu_agent.core.timeline import SPAN, GoneCard, TimelineEntry
from npu_agent.core.trends import TrendKind
from npu_agent.outputs.web.history import MOST as MOST_POINTS
from npu_agent.outputs.web.history import Figures, Track, step_of
from npu_agent.outputs.web.words import UNKNOWN, translate
from npu_agent.text import natural
from npu_agent.wording import of_problem

Tracks = Callable[[str], Track]
"""A card's last hour by the card's ID."""

MOST = 100
"""Rows and cards; /status.json has all of them."""
MANY = 12
"""Cards from which on a tile is small, and shows the rest of it when it is opened."""
_IN_FULL = 6
"""Cards with a problem that have a large tile even so; of more, each has a small one."""
_WELL = 3
STEP_WIDE = 4
"""Width of a step of the history in a curve."""
WIDE = STEP_WIDE * MOST_POINTS
"""Width of the box of a curve."""
HIGH = 72
"""Height of the box of a curve."""
_GAP = 12
"""Width without a reading from which on a curve is broken."""
_ANCHORS = {
    "card": "cards",
    "hardware": "not-served",
    "cdi": "cards",
    "node": "cards",
    "resource": "resources",
}
"""Where the page says more about a problem's subject; of the others under their own name."""
_SIGNS = {
    SessionPhase.REGISTERED: ("good", "good"),
    SessionPhase.REGISTERING: ("warn", "warn"),
    SessionPhase.NO_CARDS: ("plain", "wait"),
    SessionPhase.STANDBY: ("plain", "wait"),
    SessionPhase.WAITING: ("plain", "wait"),
}


class Tiles(NamedTuple):
    """The cards in the order of their tiles: large ones around those that are gone, then small."""

    first: Sequence[CardState]
    gone: Sequence[GoneCard]
    rest: Sequence[CardState] = ()
    small: Sequence[CardState] = ()


class Figure(NamedTuple):
    """A figure of a card: the present value, NaN where it is not known, and its last hour."""

    title: str
    unit: str
    value: float
    lines: Sequence[Sequence[str]]
    low: float
    high: float


class Held(NamedTuple):
    """What a container holds: cores of a card, or a device whose card is gone."""

    holder: Assignment
    usage: Usage | None = None
    card: CardState | None = None
    number: int = 0
    """Tells apart the links to one card: ids keep the focus."""
    device: GoneDevice | None = None


class PodHolds(NamedTuple):
    """What the containers of a Pod hold."""

    holder: Assignment
    """The first one."""
    rows: Sequence[Held]

    @property
    def several(self) -> bool:
        """Whether several containers hold something."""
        return len({row.holder.container for row in self.rows}) > 1

    @property
    def sources(self) -> Sequence[tuple[str, str]]:
        """Resources and claims, each once."""
        return [*dict.fromkeys((row.holder.resource, row.holder.claim) for row in self.rows)]


class PageView:
    """A state as the page shows it; `tracks` are its cards' last hours."""

    def __init__(self, state: AgentState, tracks: Tracks, language: str) -> None:
        self._state = state
        self._tracks = tracks
        self.wrong = problems(state)
        self.shown = [
            (problem, of_problem(problem, state, language))
            for problem in (*self.wrong, *notes(state))[:MOST]
        ]
        """Problems and notes, and their words."""
        self.unready = [written.unready for _, written in self.shown if written.unready]

    def anchor(self, card: CardState) -> str:
        return "-".join(map(str, card.card.key))

    def anchor_of(self, problem: Problem) -> str:
        concerned = {card.id for card in problem.cards}
        for card in self._state.snapshot.cards:
            if card.id in concerned:
                return self.anchor(card)
        if problem.subject == "dra" and not self._state.dra:
            return "resources"
        return _ANCHORS.get(problem.subject, problem.subject)

    def tiles(self) -> Tiles:
        """All cards, including missing ones."""
        gone = self._state.missing
        shown = self._state.snapshot.cards[:MOST]
        cards = sorted(self._state.snapshot.cards, key=self._urgency)[:MOST]
        if len(cards) + len(gone) <= MANY:
            fenced = sum(map(is_fenced, cards))
            return Tiles(cards[:fenced], gone, cards[fenced:])
        urgent = [card for card in cards if self._urgency(card) < _WELL]
        # Each keeps its place among the small ones when others change.
        return Tiles(urgent if len(urgent) <= _IN_FULL else [], gone[:_IN_FULL], small=shown)

    def _urgency(self, card: CardState) -> int:
        """Cards are sorted by it; among equals the order stays that of their numbers."""
        state = self._state
        if is_fenced(card):
            return 0
        errors = (TrendKind.ERRORS, card.id) in state.trends.found
        if self.is_hot(card) or state.is_stale(card) or errors:
            return 1
        return 2 if card.health.state is HealthState.UNKNOWN else _WELL

    def is_hot(self, card: CardState) -> bool:
        return is_hot(card, self._state)

    def in_use(self) -> int:
        """How many cards are in use."""
        return sum(bool(self._state.usages_of(card)) for card in self._state.snapshot.cards)

    def look(self, card: CardState) -> str:
        """The class of a card's tile."""
        return "fenced" if is_fenced(card) else "warm" if self.is_hot(card) else ""

    def reading(self, card: CardState) -> Reading:
        """The card's reading; one that says nothing if there is none."""
        return card.reading or Reading(at=0.0)

    def present(self, card: CardState) -> Figures:
        return Figures.of(self.reading(card))

    def track(self, card: CardState) -> Track:
        return self._tracks(card.id)

    def figures(self, card: CardState, track: Track) -> Iterator[Figure]:
        """Temperature, power and load."""
        now = self.present(card)
        end = step_of(self._state.monotonic)
        at = [WIDE - STEP_WIDE * (end - point.step) for point in track]
        for column, (title, unit, least) in enumerate(
            (("Temperature", "°C", 20.0), ("Power", "W", 5.0), ("Load", "%", 100.0))
        ):
            values = [point.figures[column] for point in track]
            ends = (0.0, 100.0) if unit == "%" else bounds(values, least)
            lines = curve(zip(at, values, strict=True), ends)
            yield Figure(title, unit, now[column], lines, *ends)

    def loads(self, card: CardState) -> Sequence[tuple[int, str, float]]:
        """Of each core its load in per cent, and how full its bar is; nothing if none is known."""
        cores = self.reading(card).cores
        stale = self._state.is_stale(card)
        if all(core.utilization is None for core in cores):
            return ()
        return [(core.core, *self._load(core.utilization, stale)) for core in cores[:64]]

    def _load(self, load: float | None, stale: bool) -> tuple[str, float]:
        if load is None or not math.isfinite(load) or stale:
            return UNKNOWN, 0.0
        return f"{load:.0f}", self.bar(load)

    def bar(self, load: float) -> float:
        """How full a bar is, in per cent."""
        return 0.0 if math.isnan(load) else min(100.0, max(0.0, load))

    def errors(self, reading: Reading) -> str:
        return ", ".join(f"{name} {count}" for name, count in reading.errors if count)

    def brief(self, card: CardState) -> str:
        """The most important properties of a card, on one line."""
        what = card.card
        driver = what.driver_version and what.driver_version.partition(",")[0]
        numa = None if what.numa_node is None else f"NUMA {what.numa_node}"
        parts = (what.pci_bus_id, numa, driver and translate("driver {0}", driver))
        return " · ".join(filter(None, parts))

    def pods_of(self, gone: GoneCard) -> str:
        """The Pods that hold a card that is gone."""
        return ", ".join(
            f"{device.assignment.namespace} / {device.assignment.pod}"
            for device in self._state.gone
            if device.card_id == gone.state.id
        )

    def marks(self, entries: Sequence[TimelineEntry]) -> Sequence[tuple[str, int]]:
        """Tone and minute of each minute of the last day in which something happened."""
        now = self._state.monotonic
        marks = dict.fromkeys(
            (tone, int(1440 * (1 - (now - at) / SPAN)))
            for tone in ("plain", "good", "warn", "bad")  # the worst is drawn last
            for entry in entries
            if entry.tone == tone
            for at in (entry.first, entry.at)
            if now - at < SPAN
        )
        return list(marks)

    def held(self) -> Sequence[PodHolds]:
        """What each Pod holds, by the cards' numbers."""
        state = self._state
        held = [
            Held(usage.assignment, usage, card, number)
            for card in state.snapshot.cards
            for number, usage in enumerate(state.usages_of(card))
        ]
        held += [Held(device.assignment, device=device) for device in state.gone]
        by_pod: dict[str, list[Held]] = {}
        for row in sorted(held, key=lambda row: natural(row.holder.pod_name)):
            by_pod.setdefault(row.holder.pod_name, []).append(row)
        return [PodHolds(rows[0].holder, rows) for rows in by_pod.values()]

    def withheld(self) -> Sequence[Device]:
        state = self._state
        return [device for row in state.resources for device in state.withheld(row)]

    def claims(self) -> Sequence[PreparedClaim]:
        return [
            claim
            for driver in self._state.dra
            for claim in sorted(driver.claims, key=lambda claim: (claim.namespace, claim.name))
        ]

    def card_of(self, device: PreparedDevice) -> CardState | None:
        return card_of(device.footprint, self._state.snapshot.cards)

    def sign(self, phase: SessionPhase) -> tuple[str, str]:
        """The colour and the icon of a registration's phase."""
        return _SIGNS.get(phase, ("bad", "bad"))


def bounds(values: Iterable[float], least: float) -> tuple[float, float]:
    """The ends of an axis: round values, so that they seldom change.

    `values` are NaN where one is missing; `least` is the smallest range, so that noise stays small.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, least

    smallest = min(finite)
    largest = max(finite)
    rough = max(least, largest - smallest) / 2
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
    low = math.floor(smallest / step) * step
    return low, max(low + 2 * step, math.ceil(largest / step) * step)


def curve(
    points: Iterable[tuple[int, float]], ends: tuple[float, float]
) -> Sequence[Sequence[str]]:
    """The lines of a curve, each the points of a polyline, in a box of `WIDE` by `HIGH`.

    Args:
        points: horizontal positions, 0 to `WIDE`, and values: NaN where one is missing. There the
            curve is broken, and where positions are more than `_GAP` apart.
        ends: the values at the bottom and at the top: see `bounds`.
    """
    low, high = ends
    bottom = HIGH - 2
    before = -WIDE
    lines: list[list[str]] = []
    for x, value in points:
        if low <= value <= high:  # not NaN
            if x - before > _GAP:
                lines.append([])
            before = x
            lines[-1].append(f"{x},{int(bottom - (value - low) * (bottom - 2) / (high - low))}")
    return lines
