"""Conditions that last on a card: heat, errors, flapping, twins. Each begins and ends once. Pure.

Where a trend begins is not where it ends: a card just at a limit is not reported each second.
Start reading at `step`. Times are seconds of `time.monotonic`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from npu_agent.core.hardware import CardState, Snapshot

HOT, VERY_HOT = 90.0, 100.0
"""°C above which a card is hot, and so hot that the load has to go now: as the alerts have it."""
_COOLED = 5.0
"""°C below the limit at which a hot card is so no longer."""
_QUIET = 900.0
"""Seconds without a new error after which errors no longer rise: as the alert has it."""
_FLAPS, _WITHIN, _STEADY = 6, 1800.0, 300.0
"""Changes within so many seconds that make a card flap, as the alert has it; seconds without a
change after which it is steady."""


class TrendKind(enum.Enum):
    """Kinds of trends."""

    HOT = "hot"
    ERRORS = "errors"
    """Its error counters rise."""
    FLAPPING = "flapping"
    """It fails and recovers, or comes and goes, repeatedly."""
    TWINS = "twins"
    """Another card reports the same UUID."""
    LINK = "link"
    """Its PCIe link has fewer lanes than it can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Something that lasts on a card."""

    card: CardState
    """As it was at the beginning, without a reading."""
    detail: str
    """For people: ``above 90 °C``."""
    since: float
    last: float
    """When it was last seen to be so."""


@dataclass(frozen=True, slots=True)
class Trends:
    """The current trends, by kind and card ID."""

    found: Mapping[tuple[TrendKind, str], Trend] = field(default_factory=dict)
    changes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """When each card failed, recovered, came or left of late."""

    def of(self, kind: TrendKind) -> Mapping[str, Trend]:
        """Returns the trends of one kind, by card ID."""
        return {id_: trend for (each, id_), trend in self.found.items() if each is kind}


def degraded(trends: Trends) -> Mapping[str, frozenset[TrendKind]]:
    """Returns the trends by card ID; a card with a trend stays in service."""
    ids = {id_ for _, id_ in trends.found}
    return {id_: frozenset(kind for kind, of in trends.found if of == id_) for id_ in ids}


def hot_above(max_temperature: float | None) -> float:
    """°C above which a card is hot, with the config's health.maxTemperature."""
    return HOT if max_temperature is None else min(HOT, max_temperature)


def is_above(card: CardState, limit: float) -> bool:
    """Whether its hottest sensor is above so many °C."""
    temperature = card.reading.temperature() if card.reading else None
    return temperature is not None and temperature > limit


def step(
    known: Trends,
    before: Snapshot,
    after: Snapshot,
    changed: Iterable[CardState],
    now: float,
    limit: float = HOT,
) -> Trends:
    """The trends at `now` once `after` has followed `before`, until when they were `known`.

    `changed` are the cards that failed, recovered, came or left; one that did so twice is there
    twice. `limit` is in °C.
    """
    ends = {TrendKind.ERRORS: _QUIET, TrendKind.FLAPPING: _STEADY}
    found = {at: one for at, one in known.found.items() if now - one.last < ends.get(at[0], 0.0)}

    def lasts(kind: TrendKind, card: CardState, detail: str, since: float = now) -> None:
        first = known.found.get((kind, card.id)) or Trend(
            card=replace(card, reading=None), detail=detail, since=since, last=now
        )
        found[kind, card.id] = replace(first, last=now) if kind in ends else first

    old = {card.id: card for card in before.cards}
    uuids = Counter(card.card.uuid for card in after.cards)
    for card in after.cards:
        if is_above(card, limit - _COOLED * ((TrendKind.HOT, card.id) in known.found)):
            lasts(TrendKind.HOT, card, f"above {limit:g} °C")
        if risen := _risen(old.get(card.id, card), card):
            lasts(TrendKind.ERRORS, card, ", ".join(risen))
        if card.card.lanes and card.card.lanes[0] < card.card.lanes[1]:
            lasts(TrendKind.LINK, card, "{} of {} lanes".format(*card.card.lanes))
        if card.card.uuid and uuids[card.card.uuid] > 1:
            lasts(TrendKind.TWINS, card, card.card.uuid)
    changes = {**known.changes}
    for card in changed:
        times = (*(at for at in changes.get(card.id, ()) if now - at < _WITHIN), now)[-_FLAPS:]
        changes[card.id] = times
        if len(times) >= _FLAPS or (TrendKind.FLAPPING, card.id) in found:
            lasts(TrendKind.FLAPPING, card, "it fails and recovers, or comes and goes", times[0])
    return Trends(found, changes)


def at_one_moment(snapshot: Snapshot, max_temperature: float | None = None) -> Trends:
    """Returns trends that one Snapshot shows: heat, and a UUID of two cards."""
    return step(Trends(), Snapshot(), snapshot, (), 0.0, hot_above(max_temperature))


def _risen(before: CardState, after: CardState) -> list[str]:
    if before.reading is after.reading or before.reading is None or after.reading is None:
        return []
    known = dict(before.reading.errors)
    return [label for label, count in after.reading.errors if count > known.get(label, 0)]
