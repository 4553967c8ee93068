"""Differences between two values of a feed, and their words for the timeline and Events. Pure.

`card_changes` is the one comparison of two Snapshots, for the log, Events and the timeline. The
functions called ``…_entries`` take the value before and the value after; those of their entries
that are also Events of the Node are `EventEntry`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from npu_agent.core.advice import GONE, TRENDS, advice, plain_reason
from npu_agent.core.cordon import Cordons
from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.state import ConfigState, LabelState, SessionPhase, SessionStatus
from npu_agent.core.timeline import EventEntry, Subject, TimelineEntry, Tone
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


_CARD_ENTRIES: Mapping[ChangeKind, tuple[Tone, str, str]] = {
    ChangeKind.REMOVED: ("bad", "NPURemoved", "{name} is gone"),
    ChangeKind.EXCHANGED: (
        "plain",
        "NPUExchanged",
        "{name} is another card now: {title}, {id}, in place of {before_id}",
    ),
    ChangeKind.ADDED: ("good", "NPUAdded", "{name} was added: {title}"),
    ChangeKind.RENUMBERED: ("plain", "", "{before} is {name} now"),
    ChangeKind.UNHEALTHY: ("bad", "NPUUnhealthy", "{name} became unhealthy: {reason}"),
    ChangeKind.RECOVERED: ("good", "NPURecovered", "{name} recovered: {reason}"),
}
"""Tone, reason of the Event (empty: there is none), and text."""


def card_entries(changes: Iterable[CardChange]) -> Iterator[TimelineEntry]:
    """Returns entries for cards, but not for those found at the start."""
    for change in changes:
        if change.kind in _CARD_ENTRIES:
            tone, event, text = _CARD_ENTRIES[change.kind]
            text = text.format(
                name=change.card.card.name,
                title=change.card.card.title,
                id=change.card.id,
                before=change.before and change.before.card.name,
                before_id=change.before and change.before.id,
                reason=plain_reason(change.card.health),
            )
            remedy = {
                ChangeKind.REMOVED: GONE,
                ChangeKind.UNHEALTHY: advice(change.card.health.cause).remedy,
            }.get(change.kind, "")
            yield EventEntry("card", tone, text, change.card.id, reason=event, remedy=remedy)


_TREND_REASONS = {
    TrendKind.HOT: ("NPUHot", "NPUCooled"),
    TrendKind.ERRORS: ("NPUErrorsRising", "NPUErrorsQuiet"),
    TrendKind.FLAPPING: ("NPUFlapping", "NPUSteady"),
    TrendKind.TWINS: ("NPUSameUUID", "NPUOwnUUID"),
    TrendKind.LINK: ("NPULinkSlow", "NPULinkRestored"),
    TrendKind.SLOW: ("NPUSlow", "NPUNotSlow"),
}
"""For each thing that lasts: the reason of the Event of its beginning, and of its end."""


def trend_entries(before: Trends, after: Trends) -> Iterator[TimelineEntry]:
    for kind, trend, began in trend_changes(before, after):
        card, words = trend.card, TRENDS[kind]
        beginning, end = _TREND_REASONS[kind]
        subject: Subject = "errors" if kind is TrendKind.ERRORS else "card"
        if began:
            if not trend.counted:
                beginning = "NPUHardwareError"
            text = f"{card.card.name} {words.begins}: {trend.detail}"
            yield EventEntry(subject, "warn", text, card.id, reason=beginning, remedy=words.remedy)
        else:
            text = f"{card.card.name} {words.ends}"
            yield EventEntry(subject, "good", text, card.id, reason=end)


def cordon_entries(before: Cordons, after: Cordons) -> Iterator[TimelineEntry]:
    for id_, name in after.present.items():  # a card that is gone was not uncordoned
        reason = after.cards.get(id_)
        if reason == before.cards.get(id_):
            continue
        if reason is None:
            text = f"{name} was uncordoned: new Pods get it again"
            yield EventEntry("card", "good", text, id_, reason="NPUUncordoned")
        else:
            text = f"{name} was cordoned, no new Pod gets it: {reason}"
            yield EventEntry("card", "plain", text, id_, reason="NPUCordoned")


def config_entries(before: ConfigState, after: ConfigState) -> Iterator[TimelineEntry]:
    if after.generation != before.generation:
        text = "a new config is applied"
        if after.waiting:
            text += f"; a restart is needed for {', '.join(after.waiting)}"
        yield TimelineEntry("config", "good", text)
    elif before.error is not None and after.error is None:
        yield TimelineEntry("config", "good", "the config file is good again")
    if after.error is not None and after.error != before.error:
        errors = "; ".join(after.error.splitlines())
        text = f"the config file is refused, the last good one stays in force: {errors}"
        yield EventEntry("config", "bad", text, reason="ConfigRejected")


def session_entries(
    before: SessionStatus, after: SessionStatus, subject: Subject
) -> Iterator[TimelineEntry]:
    """Returns timeline entries for the registration of a resource or DRA driver."""
    name = after.resource
    reason = f": {after.reason}" if after.reason else ""
    if after.registrations > before.registrations:
        again = " again" if before.registrations else ""
        yield TimelineEntry(subject, "good", f"the kubelet registered {name}{again}")
    elif (after.phase, after.reason) == (before.phase, before.reason):
        return
    elif after.phase is SessionPhase.BLOCKED:
        event = "DRANotServed" if subject == "dra" else ""
        yield EventEntry(subject, "bad", f"{name} cannot be served{reason}", reason=event)
    elif after.phase is before.phase:
        return
    elif after.phase is SessionPhase.STANDBY:
        yield TimelineEntry(subject, "plain", f"{name} is on standby{reason}")
    elif before.phase is SessionPhase.REGISTERED and after.phase is SessionPhase.REGISTERING:
        yield TimelineEntry(subject, "warn", f"the kubelet dropped {name}{reason}")


def label_entries(before: LabelState, after: LabelState) -> Iterator[TimelineEntry]:
    if after.error is not None and before.error is None:
        yield TimelineEntry("labels", "warn", f"the Node's labels were not applied: {after.error}")
    elif after.applied_at != before.applied_at and after.in_place:
        yield TimelineEntry("labels", "good", "the Node's labels were applied")


def usage_entries(
    before: Collection[Usage], after: Collection[Usage], old: Snapshot, new: Snapshot
) -> Iterator[TimelineEntry]:
    """Returns timeline entries for Pods that got or released a present card."""
    stayed = {state.id for state in old.cards}
    names = {state.id: state.card.name for state in new.cards if state.id in stayed}
    had, has = _holders(before), _holders(after)
    for what, changed in (("released", had - has), ("was given", has - had)):
        for pod, card in sorted(changed):
            if card in names:
                yield TimelineEntry("assignments", "plain", f"{pod} {what} {names[card]}", card)


def _holders(usages: Collection[Usage]) -> set[tuple[str, str]]:
    return {(usage.assignment.pod_name, usage.card_id) for usage in usages}
