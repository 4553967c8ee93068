"""What has happened between two values of a feed, for the timeline: pure functions.

Each takes the value before and the value after, and gives what people should find when they ask
"what went on here last night?", in plain words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from npu_agent.core.advice import plain_reason
from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.state import ConfigState, LabelState, SessionPhase, SessionStatus
from npu_agent.core.timeline import Subject, TimelineEntry, Tone

Errors = Mapping[str, tuple[str, tuple[tuple[str, int], ...]]]
"""By a card's ID, its name and error counters."""


def gone(before: Snapshot, after: Snapshot) -> tuple[CardState, ...]:
    """The cards that left."""
    if not after.complete:
        return ()
    present = {state.id for state in after.cards}
    return tuple(state for state in before.cards if state.id not in present)


def to_cards(before: Snapshot, after: Snapshot) -> Iterator[TimelineEntry]:
    """What happened to cards. The first complete Snapshot adds none: they were there before."""
    if not after.complete:
        return
    old = {state.id: state for state in before.cards}
    for state in gone(before, after):
        yield _of_card(state, "bad", f"{state.card.name} is gone")
    for state in after.cards:
        name, health, previous = state.card.name, state.health, old.get(state.id)
        if previous is None and before.complete:
            yield _of_card(state, "good", f"{name} was added: {state.card.title}")
        if previous is not None and previous.card.name != name:
            yield _of_card(state, "plain", f"{previous.card.name} is {name} now")
        was = previous.health.state if previous else HealthState.HEALTHY
        if health.state is HealthState.UNHEALTHY and was is not health.state:
            yield _of_card(state, "bad", f"{name} became unhealthy: {plain_reason(health)}")
        elif was is HealthState.UNHEALTHY and health.state is not was:
            yield _of_card(state, "good", f"{name} recovered")


def _of_card(state: CardState, tone: Tone, text: str) -> TimelineEntry:
    return TimelineEntry(subject="card", tone=tone, text=text, card=state.id)


def errors_of(snapshot: Snapshot) -> Errors:
    """The error counters of the cards that have been read."""
    return {
        state.id: (state.card.name, state.reading.errors)
        for state in snapshot.cards
        if state.reading is not None and state.reading.errors
    }


def errors(before: Errors, after: Errors) -> Iterator[TimelineEntry]:
    """Which counters rose. A card that was not read before says nothing new."""
    for id_, (name, counters) in after.items():
        _, old = before.get(id_, ("", counters))
        known = dict(old)
        new = {label: count - known.get(label, 0) for label, count in counters}
        risen = [label for label, more in new.items() if more > 0]
        if risen:
            text = f"{name} counted new errors: {', '.join(risen)}"
            yield TimelineEntry(subject="errors", tone="warn", text=text, card=id_)


def to_config(before: ConfigState, after: ConfigState) -> Iterator[TimelineEntry]:
    """What happened to the config file."""
    if after.generation != before.generation:
        text = "a new config is in force"
        if after.waiting:
            text += f"; a restart is needed for {', '.join(after.waiting)}"
        yield TimelineEntry(subject="config", tone="good", text=text)
    elif before.error is not None and after.error is None:
        yield TimelineEntry(subject="config", tone="good", text="the config file is good again")
    if after.error is not None and after.error != before.error:
        first = after.error.partition("\n")[0]
        text = f"the config file was refused: {first}"
        yield TimelineEntry(subject="config", tone="bad", text=text)


def to_session(
    before: SessionStatus, after: SessionStatus, subject: Subject
) -> Iterator[TimelineEntry]:
    """What happened to a resource, or to a DRA driver, at the kubelet."""
    name = after.resource
    reason = f": {after.reason}" if after.reason else ""
    if after.registrations > before.registrations:
        again = " again" if before.registrations else ""
        text = f"the kubelet registered {name}{again}"
        yield TimelineEntry(subject=subject, tone="good", text=text)
    elif after.phase is before.phase:
        return
    elif after.phase is SessionPhase.BLOCKED:
        yield TimelineEntry(subject=subject, tone="bad", text=f"{name} cannot be served{reason}")
    elif after.phase is SessionPhase.STANDBY:
        yield TimelineEntry(subject=subject, tone="plain", text=f"{name} is on standby{reason}")
    elif before.phase is SessionPhase.REGISTERED and after.phase is SessionPhase.REGISTERING:
        text = f"the kubelet dropped {name}{reason}"
        yield TimelineEntry(subject=subject, tone="warn", text=text)


def to_labels(before: LabelState | None, after: LabelState | None) -> Iterator[TimelineEntry]:
    """What happened to the Node's labels."""
    if before is None or after is None:
        return
    if after.error is not None and before.error is None:
        text = f"the Node's labels were not applied: {after.error}"
        yield TimelineEntry(subject="labels", tone="warn", text=text)
    elif after.applied_at != before.applied_at and after.in_place:
        yield TimelineEntry(subject="labels", tone="good", text="the Node's labels were applied")


def to_holdings(
    before: Collection[Usage], after: Collection[Usage], old: Snapshot, new: Snapshot
) -> Iterator[TimelineEntry]:
    """Who was given a card, and who no longer holds one.

    A holding is of a present card: what changes with a card that comes or goes is no news.
    """
    stayed = {state.id for state in old.cards}
    names = {state.id: state.card.name for state in new.cards if state.id in stayed}
    had, has = _holders(before), _holders(after)
    for what, changed in (("released", had - has), ("was given", has - had)):
        for pod, card in sorted(changed):
            if card in names:
                text = f"{pod} {what} {names[card]}"
                yield TimelineEntry(subject="assignments", tone="plain", text=text, card=card)


def _holders(holdings: Collection[Usage]) -> set[tuple[str, str]]:
    """Pods, each with the ID of a card that it holds cores of."""
    return {(f"{one.assignment.namespace}/{one.assignment.pod}", one.card_id) for one in holdings}
