"""Rules that find what is out of the ordinary and no fault. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from npu_agent.core.hardware import CardState, HealthState
from npu_agent.core.kinds import Kind, Problem
from npu_agent.core.problems.cards import (
    MISSED,
    counted,
    earlier_cards,
    is_served_by_person,
    named,
    nodes_of,
)
from npu_agent.core.state import AgentState, SessionPhase, SessionStatus, is_fenced
from npu_agent.core.trends import TrendKind

_LOADED = 20.0
"""Per cent of a core's cycles from which on it works: as the alert has it."""


def notes(state: AgentState) -> Iterator[Problem]:
    """Returns what is out of the ordinary and no problem."""
    if any(card.card.simulated for card in state.snapshot.cards):
        yield Problem("CardsSimulated")
    if state.maintenance:
        yield Problem("Maintenance", facts={"reason": state.maintenance})
    yield from _gone(state)
    for card in state.snapshot.cards:
        yield from _of_card(card, state)
    for ids, limit in state.trends.alike:
        alike = [card for card in state.snapshot.cards if card.id in ids]
        yield Problem("LimitsAlike", named(alike), facts={"limit": limit})
    yield from _odd(state)
    yield from _busy(state)
    yield from _of_services(state)
    if state.config.waiting:
        yield Problem("ConfigWaitsForRestart", facts={"keys": ", ".join(state.config.waiting)})
    labels = state.labels
    if labels is not None and not labels.in_place and labels.error is None and labels.labels:
        yield Problem("LabelsPending")
    if state.kernel_error:
        yield Problem("KernelUnheard", facts={"reason": state.kernel_error})


def _gone(state: AgentState) -> Iterator[Problem]:
    for gone in state.missing:
        if gone.state.id in state.pods_of_gone:
            continue
        cordoned = state.cordon_of_gone(gone)
        if cordoned is not None:
            yield Problem("CordonedCardMissing", named([gone.state]), facts={"reason": cordoned})
        elif state.monotonic - gone.since >= MISSED:
            yield Problem("CardLongMissing", named([gone.state]))
    before = earlier_cards(state)
    if before and state.monotonic - state.started_at >= MISSED:
        yield Problem("EarlierCardLongMissing", facts={"earlier": before})


def _of_card(card: CardState, state: AgentState) -> Iterator[Problem]:
    cards = named([card])
    if card.health.state is HealthState.UNKNOWN:
        yield Problem("HealthUnknown", cards, facts={"reason": card.health.reason})
    errors = counted(card)
    if errors and (TrendKind.ERRORS, card.id) not in state.trends.found:
        yield Problem("ErrorsCounted", cards, facts={"errors": ", ".join(errors)})
    reason = state.cordons.get(card.id)
    if reason is not None:
        broken = is_fenced(card) and is_served_by_person(card, state)
        yield Problem(
            "CordonedCardUnhealthy" if broken else "CardCordoned",
            cards,
            facts={"reason": reason, "why": card.health},
        )
    if state.is_disabled(card):
        first = state.first_ids.get(card.card.name, card.id)
        moved = card.card.name in state.disabled and first != card.id
        yield Problem(
            "DisabledNameMoved" if moved else "CardDisabled", cards, facts={"first": first}
        )


def _odd(state: AgentState) -> Iterator[Problem]:
    by_oddity: dict[tuple[Kind, str], list[CardState]] = {}
    for card in state.snapshot.cards:
        for oddity in dict.fromkeys(card.card.oddities):
            by_oddity.setdefault(oddity, []).append(card)
    for (kind, text), cards in by_oddity.items():
        yield Problem(kind, named(cards), facts={"text": text})


def _busy(state: AgentState) -> Iterator[Problem]:
    stray = {card.id: _stray_load(card, state) for card in state.snapshot.cards}
    busy = [card for card in state.snapshot.cards if stray[card.id] > _LOADED]
    if busy:
        yield Problem(
            "LoadWithoutPod",
            named(busy),
            facts={"load": max(stray[card.id] for card in busy), "nodes": nodes_of(busy)},
        )


def _stray_load(card: CardState, state: AgentState) -> float:
    """The load of its busiest core where no Pod holds it, as far as the kubelet says that."""
    known = state.assignments_error is None and (state.resources or state.dra)
    if (
        not known
        or card.card.simulated
        or state.usages_of(card)
        or state.is_stale(card)
        or card.reading is None
    ):
        return 0.0
    return max((core.utilization or 0.0 for core in card.reading.cores), default=0.0)


def _of_services(state: AgentState) -> Iterator[Problem]:
    for resource in state.resources:
        for device in state.withheld(resource):
            yield Problem("DeviceWithheld", facts={"device": device.name, "reason": device.reason})
    for driver in state.dra:
        if driver.slices.dropped:
            yield Problem(
                "PartitionsDropped" if driver.slices.uncounted else "FieldsDropped",
                facts={"fields": ", ".join(driver.slices.dropped)},
            )
    sessions: list[tuple[Kind, SessionStatus]] = [
        *(("DRAStandby", driver.session) for driver in state.dra),
        *(("ResourceStandby", resource.session) for resource in state.resources),
    ]
    for kind, session in sessions:
        if session.phase is SessionPhase.STANDBY:
            yield Problem(kind, facts={"service": session.resource, "reason": session.reason})
