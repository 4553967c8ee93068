"""Conditions that last on a card: heat, errors, limits. Each begins and ends once. Pure.

Where a trend begins is not where it ends: a card just at a limit is not reported each second.
Start reading at `step`. Times are seconds of `time.monotonic`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from npu_agent.core import comparison
from npu_agent.core.hardware import CardState, Snapshot
from npu_agent.core.health import Policy
from npu_agent.core.kinds import Message

HOT = 90.0
"""°C above which a card is hot, as the alert has it."""
VERY_HOT = 100.0
"""°C above which the load has to go now, as the alert has it."""
_COOLED = 5.0
"""°C below the limit at which a hot card is so no longer."""
_QUIET = 900.0
"""Seconds without a new error after which errors no longer rise: as the alert has it."""
_FLAPS = 6
"""Changes that make a card flap, as the alert has it."""
_WITHIN = 1800.0
"""Seconds in which these changes come."""
_STEADY = 300.0
"""Seconds without a change after which a card is steady."""
_MOST = 128
"""Cards whose changes are counted."""
_DEFAULT = Policy()


class TrendKind(enum.Enum):
    """Kinds of trends."""

    HOT = "hot"
    ERRORS = "errors"
    """Its error counters rise, or what the driver says of its errors changes."""
    FLAPPING = "flapping"
    """It fails and recovers, or comes and goes, repeatedly."""
    TWINS = "twins"
    """Another card reports the same UUID."""
    LINK = "link"
    """Its PCIe link has fewer lanes or less speed than it can have, or less than its siblings'."""
    SLOW = "slow"
    """It is limited or throttled, compared with its siblings or its own default."""


Detail = tuple[Message | str, ...]
"""What is so of a card, each for itself: ``above 90 °C``. Texts are the driver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Something that lasts on a card."""

    card: CardState
    """As it was at the beginning, without a reading."""
    detail: Detail
    since: float
    last: float
    """When it was last seen to be so."""
    counted: bool = True
    """Of errors, whether the driver counts them; else its text on them has changed."""


@dataclass(frozen=True, slots=True)
class Trends:
    """The current trends, by kind and card ID."""

    found: Mapping[tuple[TrendKind, str], Trend] = field(default_factory=dict)
    changes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """When each card failed, recovered, came or left of late; the latest comes last."""
    slow_since: Mapping[str, float] = field(default_factory=dict)
    """The slow cards, and when each became so."""
    alike: tuple[tuple[tuple[str, ...], Message], ...] = ()
    """Cards of one product that all have a limit, by ID, and the limit."""

    def of(self, kind: TrendKind) -> Mapping[str, Trend]:
        """Returns the trends of one kind, by card ID."""
        return {id_: trend for (of_kind, id_), trend in self.found.items() if of_kind is kind}


def degraded(trends: Trends) -> Mapping[str, frozenset[TrendKind]]:
    """Returns the trends by card ID; a card with a trend stays in service."""
    ids = {id_ for _, id_ in trends.found}
    return {id_: frozenset(kind for kind, of in trends.found if of == id_) for id_ in ids}


def hot_above(card: CardState, max_temperature: float | None) -> float:
    """°C above which a card is hot: where its driver slows it down, or else `HOT`.

    `max_temperature` is the config's health.maxTemperature.
    """
    slowdown = card.reading.limits.slowdown if card.reading else None
    return min(slowdown or HOT, max_temperature or slowdown or HOT)


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
    policy: Policy = _DEFAULT,
) -> Trends:
    """The trends at `now` once `after` has followed `before`, until when they were `known`.

    `changed` are the cards that failed, recovered, came or left; one that did so twice is there
    twice.
    """
    ends = {TrendKind.ERRORS: _QUIET, TrendKind.FLAPPING: _STEADY}
    current = {
        at: trend for at, trend in known.found.items() if now - trend.last < ends.get(at[0], 0.0)
    }

    def lasts(
        kind: TrendKind,
        card: CardState,
        detail: Detail,
        since: float = now,
        *,
        counted: bool = True,
    ) -> None:
        first = known.found.get((kind, card.id)) or Trend(
            card=replace(card, reading=None),
            detail=detail,
            since=since,
            last=now,
            counted=counted,
        )
        current[kind, card.id] = replace(first, last=now) if kind in ends else first

    old = {card.id: card for card in before.cards}
    uuids = Counter(card.card.uuid for card in after.cards)
    for card in after.cards:
        limit = hot_above(card, policy.max_temperature)
        was_hot = (TrendKind.HOT, card.id) in known.found
        if is_above(card, limit - _COOLED if was_hot else limit):
            lasts(TrendKind.HOT, card, (Message("AboveLimit", facts={"limit": limit}),))
        if risen := _risen(old.get(card.id, card), card):
            lasts(TrendKind.ERRORS, card, (", ".join(risen),))
        elif text := _new_text(old.get(card.id, card), card):
            lasts(TrendKind.ERRORS, card, (text,), counted=False)
        if link := comparison.slow_link(card, after.cards):
            lasts(TrendKind.LINK, card, link)
        if card.card.uuid and uuids[card.card.uuid] > 1:
            lasts(TrendKind.TWINS, card, (card.card.uuid,))
    slow = comparison.slow(after.cards) if policy.slow_after else {}
    slow_since = {id_: known.slow_since.get(id_, now) for id_ in slow}
    for card in after.cards:
        if card.id in slow and now - slow_since[card.id] >= policy.slow_after:
            lasts(TrendKind.SLOW, card, slow[card.id].detail, slow_since[card.id])
    alike = comparison.alike(after.cards) if policy.slow_after else ()
    changes = {id_: at for id_, at in known.changes.items() if now - at[-1] < _WITHIN}
    for card in changed:
        times = (*(at for at in changes.pop(card.id, ()) if now - at < _WITHIN), now)[-_FLAPS:]
        changes[card.id] = times
        if len(times) >= _FLAPS or (TrendKind.FLAPPING, card.id) in current:
            lasts(
                TrendKind.FLAPPING,
                card,
                (),
                times[0],
            )
    same = tuple((tuple(card.id for card in cards), limit) for cards, limit in alike)
    # A card that has another identity each time it comes back would fill the memory.
    return Trends(current, dict([*changes.items()][-_MOST:]), slow_since, same)


def _risen(before: CardState, after: CardState) -> list[str]:
    if before.reading is after.reading or before.reading is None or after.reading is None:
        return []
    known = dict(before.reading.errors)
    return [label for label, count in after.reading.errors if count > known.get(label, count)]


def _new_text(before: CardState, after: CardState) -> str | None:
    """Returns what the driver says of errors if that is new; zeros say that there are none."""
    if before.reading is None or after.reading is None:
        return None

    was = before.reading.error_text
    text = after.reading.error_text
    return text if was and text and text != was and text.strip("0x") else None
