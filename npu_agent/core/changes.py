"""Differences between two values of a feed, as entries of the timeline and Events. Pure.

`card_changes` is the one comparison of two Snapshots, for the log, Events and the timeline. The
functions called ``…_entries`` take the value before and the value after.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from npu_agent.core.cordon import Cordons
from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.core.kinds import NamedCard
from npu_agent.core.ledger import Usage, absent
from npu_agent.core.state import ConfigState, EvictionState, LabelState, SessionPhase, SessionStatus
from npu_agent.core.timeline import EntryKind, Subject, TimelineEntry
from npu_agent.core.trends import Trend, TrendKind, Trends


class ChangeKind(enum.Enum):
    """Kinds of change of a card."""

    REMOVED = "removed"
    EXCHANGED = "exchanged"
    """Another card is in the place of one that was there."""
    FOUND = "found"
    """It was there at the start."""
    ADDED = "added"
    RENUMBERED = "renumbered"
    UNHEALTHY = "unhealthy"
    RECOVERED = "recovered"
    HEALTH = "health"
    """Between healthy and unknown."""


@dataclass(frozen=True, slots=True)
class CardChange:
    """A change of one card."""

    kind: ChangeKind
    card: CardState
    """As it is now, or was before its removal."""
    before: CardState | None = None
    """As it was, or the card that it has taken the place of; None: it was not there."""


def card_changes(before: Snapshot, after: Snapshot) -> Iterator[CardChange]:
    """Returns the changes of cards between two Snapshots; none while incomplete.

    A card that is unhealthy when it is found or added has become so.
    """
    if not after.complete:
        return
    old = {state.id: state for state in before.cards}
    new = {state.id for state in after.cards}
    places = {state.card.place: state for state in after.cards if state.id not in old}
    exchanged = {}
    for state in before.cards:
        if state.id not in new and state.card.place in places:
            exchanged[places[state.card.place].id] = state
        elif state.id not in new:
            yield CardChange(ChangeKind.REMOVED, state)
    for state in after.cards:
        previous = old.get(state.id)
        if state.id in exchanged:
            yield CardChange(ChangeKind.EXCHANGED, state, exchanged[state.id])
        elif previous is None:
            yield CardChange(ChangeKind.ADDED if before.complete else ChangeKind.FOUND, state)
        elif previous.card.name != state.card.name:
            yield CardChange(ChangeKind.RENUMBERED, state, previous)
        was = previous.health.state if previous else HealthState.HEALTHY
        now = state.health.state
        if now is HealthState.UNHEALTHY and was is not now:
            yield CardChange(ChangeKind.UNHEALTHY, state, previous)
        elif was is HealthState.UNHEALTHY and was is not now:
            yield CardChange(ChangeKind.RECOVERED, state, previous)
        elif previous and was is not now:
            yield CardChange(ChangeKind.HEALTH, state, previous)


def lost_entries(
    recorded: Mapping[str, frozenset[str]], before: Snapshot, after: Snapshot
) -> Iterator[TimelineEntry]:
    """Returns entries for the cards of an earlier agent that the first complete Snapshot lacks."""
    unread = any(odd.unread for odd in after.skipped)  # it may be one of these
    if after.complete and not (before.complete or unread):
        for id_, name in absent(recorded, after.cards).items():
            yield TimelineEntry("NPULost", (NamedCard(id_, name),), subject="card")


def flaps(changes: Iterable[CardChange]) -> tuple[CardState, ...]:
    """The cards that failed, recovered, came or left: a card with many of these flaps."""
    counted = (ChangeKind.REMOVED, ChangeKind.ADDED, ChangeKind.UNHEALTHY, ChangeKind.RECOVERED)
    return tuple(change.card for change in changes if change.kind in counted)


def without_flapping(changes: Iterable[CardChange], trends: Trends) -> Iterator[CardChange]:
    """The changes that people should find: not each one of a card that flaps."""
    flapping = trends.of(TrendKind.FLAPPING)
    return (change for change in changes if change.card.id not in flapping)


def trend_changes(before: Trends, after: Trends) -> Iterator[tuple[TrendKind, Trend, bool]]:
    """Yields the trends that have ended or begun, each with whether it began."""
    for at, trend in before.found.items():
        if at not in after.found:
            yield at[0], trend, False
    for at, trend in after.found.items():
        if at not in before.found:
            yield at[0], trend, True


_CARDS: Mapping[ChangeKind, tuple[EntryKind, tuple[str, ...]]] = {
    ChangeKind.REMOVED: ("NPURemoved", ()),
    ChangeKind.EXCHANGED: ("NPUExchanged", ("title", "id", "before_id")),
    ChangeKind.ADDED: ("NPUAdded", ("title",)),
    ChangeKind.RENUMBERED: ("NPURenumbered", ("before",)),
    ChangeKind.UNHEALTHY: ("NPUUnhealthy", ("why",)),
    ChangeKind.RECOVERED: ("NPURecovered", ("why",)),
}
"""The changes that the timeline has, each with the facts that it quotes: the same again is counted.
Cards that are found at the start are none."""


def card_entries(changes: Iterable[CardChange]) -> Iterator[TimelineEntry]:
    """Returns entries for cards, but not for those found at the start."""
    for change in changes:
        if change.kind in _CARDS:
            state = change.card
            kind, quoted = _CARDS[change.kind]
            facts = {
                "title": state.card.title,
                "id": state.id,
                "before": change.before and change.before.card.name,
                "before_id": change.before and change.before.id,
                "why": replace(state.health, since=0.0),
            }
            yield TimelineEntry(
                kind,
                (NamedCard.of(state),),
                facts={name: facts[name] for name in quoted},
                cause=state.health.cause,
                subject="card",
            )


TREND_ENTRIES: Mapping[TrendKind, tuple[EntryKind, EntryKind]] = {
    TrendKind.HOT: ("NPUHot", "NPUCooled"),
    TrendKind.ERRORS: ("NPUErrorsRising", "NPUErrorsQuiet"),
    TrendKind.FLAPPING: ("NPUFlapping", "NPUSteady"),
    TrendKind.TWINS: ("NPUSameUUID", "NPUOwnUUID"),
    TrendKind.LINK: ("NPULinkSlow", "NPULinkRestored"),
    TrendKind.SLOW: ("NPUSlow", "NPUNotSlow"),
}
"""For each thing that lasts: the entry of its beginning, and of its end."""


def trend_entries(before: Trends, after: Trends) -> Iterator[TimelineEntry]:
    for kind, trend, began in trend_changes(before, after):
        yield trend_entry(kind, trend, began)


def trend_entry(kind: TrendKind, trend: Trend, began: bool = True) -> TimelineEntry:
    """Returns the entry of the beginning of a trend, or of its end."""
    beginning, end = TREND_ENTRIES[kind]
    if not trend.counted:
        beginning = "NPUHardwareError"
    subject: Subject = "errors" if kind is TrendKind.ERRORS else "card"
    return TimelineEntry(
        beginning if began else end,
        (NamedCard.of(trend.card),),
        facts={"detail": trend.detail} if began else {},
        subject=subject,
    )


def cordon_entries(before: Cordons, after: Cordons) -> Iterator[TimelineEntry]:
    for id_, name in after.present.items():  # a card that is gone was not uncordoned
        reason = after.cards.get(id_)
        if reason == before.cards.get(id_):
            continue
        cards = (NamedCard(id_, name),)
        if reason is None:
            yield TimelineEntry("NPUUncordoned", cards, subject="card")
        else:
            facts = {"reason": reason}
            yield TimelineEntry("NPUCordoned", cards, facts=facts, subject="card")


def eviction_entries(before: EvictionState, after: EvictionState) -> Iterator[TimelineEntry]:
    for evicted in after.evicted:
        if evicted not in before.evicted:
            yield TimelineEntry(
                "PodNotEvicted" if evicted.left else "PodEvicted",
                (evicted.card,),
                (evicted.pod,),
                {
                    "uid": evicted.uid,
                    "seconds": evicted.seconds,
                    "daemon": evicted.of_daemon_set,
                },
                subject="assignments",
            )


def config_entries(before: ConfigState, after: ConfigState) -> Iterator[TimelineEntry]:
    if after.generation != before.generation and after.waiting:
        facts = {"keys": ", ".join(after.waiting)}
        yield TimelineEntry("ConfigAppliedInPart", facts=facts, subject="config")
    elif after.generation != before.generation:
        yield TimelineEntry("ConfigApplied", subject="config")
    elif before.errors and not after.errors:
        yield TimelineEntry("ConfigGoodAgain", subject="config")
    if after.errors and after.errors != before.errors:
        facts = {"error": "; ".join(after.errors)}
        yield TimelineEntry("ConfigRejected", facts=facts, subject="config")


def session_entries(
    before: SessionStatus, after: SessionStatus, subject: Subject
) -> Iterator[TimelineEntry]:
    """Returns timeline entries for the registration of a resource or DRA driver."""
    kind: EntryKind
    if after.registrations > before.registrations:
        kind = "RegisteredAgain" if before.registrations else "Registered"
    elif (after.phase, after.reason) == (before.phase, before.reason):
        return
    elif after.phase is SessionPhase.BLOCKED:
        kind = "DRANotServed" if subject == "dra" else "ResourceNotServed"
    elif after.phase is SessionPhase.STANDBY is not before.phase:
        kind = "Standby"
    elif (before.phase, after.phase) == (SessionPhase.REGISTERED, SessionPhase.REGISTERING):
        kind = "RegistrationLost"
    else:
        return
    facts = {"service": after.resource, "reason": after.reason}
    yield TimelineEntry(kind, facts=facts, subject=subject)


def label_entries(before: LabelState, after: LabelState) -> Iterator[TimelineEntry]:
    if after.error is not None and before.error is None:
        facts = {"error": after.error}
        yield TimelineEntry("LabelsFailed", facts=facts, subject="labels")
    elif after.applied_at != before.applied_at and after.in_place:
        yield TimelineEntry("LabelsApplied", subject="labels")


def usage_entries(
    before: Collection[Usage], after: Collection[Usage], old: Snapshot, new: Snapshot
) -> Iterator[TimelineEntry]:
    """Returns timeline entries for Pods that got or released a present card."""
    stayed = {state.id for state in old.cards}
    present = {state.id: NamedCard.of(state) for state in new.cards if state.id in stayed}
    had = _holders(before)
    has = _holders(after)
    changed: tuple[tuple[EntryKind, set[tuple[str, str]]], ...] = (
        ("NPUReleased", had - has),
        ("NPUGiven", has - had),
    )
    for kind, pairs in changed:
        for pod, card in sorted(pairs):
            if card in present:
                yield TimelineEntry(
                    kind, (present[card],), facts={"pod": pod}, subject="assignments"
                )


def _holders(usages: Collection[Usage]) -> set[tuple[str, str]]:
    return {(usage.assignment.pod_name, usage.card_id) for usage in usages}
