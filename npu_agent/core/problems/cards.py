"""Rules that find problems of cards. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from npu_agent.core.hardware import CardState, Cause
from npu_agent.core.kinds import Kind, Message, NamedCard, Problem
from npu_agent.core.ledger import (
    Assignment,
    Footprint,
    absent,
    contradict,
    footprints_of,
    keys_of,
)
from npu_agent.core.state import AgentState, is_fenced
from npu_agent.core.timeline import GoneCard
from npu_agent.core.trends import VERY_HOT, Detail, Trend, TrendKind, is_above

MISSED = 6 * 3600.0
"""Seconds for which a card that left is a problem, as the alert has it; later it is a note."""

TRENDS: Mapping[TrendKind, Kind] = {
    TrendKind.FLAPPING: "CardFlapping",
    TrendKind.HOT: "CardHot",
    TrendKind.ERRORS: "ErrorsRising",
    TrendKind.LINK: "LinkSlow",
    TrendKind.SLOW: "CardSlow",
    TrendKind.TWINS: "SameUUID",
}
"""For each trend, the kind of problem that it is."""


def problems(state: AgentState) -> Iterator[Problem]:
    """Yields problems of cards, by harm within a severity."""
    cards = state.snapshot.cards
    working = [card for card in cards if not is_fenced(card)]
    yield from _unhealthy(state)
    yield from _gone(state)
    yield from _replaced(state)
    yield from _fewer(state)
    # One that flaps may be gone at this very moment.
    flapping = [trend.card for trend in state.trends.of(TrendKind.FLAPPING).values()]
    yield from _lasting(TrendKind.FLAPPING, flapping, state)
    yield from _hot(working, state)
    yield from _stale(working, state)
    for kind in (TrendKind.ERRORS, TrendKind.LINK, TrendKind.SLOW):
        yield from _lasting(kind, working, state)
    twins = state.trends.of(TrendKind.TWINS)
    for uuid in sorted({twin.card.card.uuid or "" for twin in twins.values()}):
        same = [card for card in cards if card.card.uuid == uuid]
        yield from _lasting(TrendKind.TWINS, same, state)


def by_cause(cards: Iterable[CardState]) -> list[list[CardState]]:
    """Groups unhealthy cards by cause, in the order of the first card of each."""
    groups: dict[Cause | str, list[CardState]] = {}
    for card in cards:
        groups.setdefault(card.health.cause or card.health.reason, []).append(card)
    return [*groups.values()]


def named(cards: Iterable[CardState]) -> tuple[NamedCard, ...]:
    return tuple(map(NamedCard.of, cards))


def nodes_of(cards: Iterable[CardState]) -> tuple[tuple[str, ...], ...]:
    """Returns the device nodes of each card, relative to /dev; also those that are missing."""
    return tuple(card.card.access.nodes() for card in cards)


def is_served_by_person(card: CardState, state: AgentState) -> bool:
    """Whether a person works on the card already, and no Pod holds it: no alerts either."""
    return card.id in state.cordons and not state.usages_of(card)


def is_hot(card: CardState, state: AgentState) -> bool:
    """Whether the card's temperature is a reason to act, fenced for it or not."""
    return card.id in state.trends.of(TrendKind.HOT) and not state.is_stale(card)


def counted(card: CardState) -> tuple[str, ...]:
    """Returns the error counters that are not 0: ``pcie_post_error 17``."""
    counters = card.reading.errors if card.reading else ()
    return tuple(f"{label} {count}" for label, count in counters if count)


def earlier_cards(state: AgentState) -> tuple[str, ...]:
    """Returns the cards that the agent before this one had, and this one has not seen."""
    seen = [*state.snapshot.cards, *(gone.state for gone in state.timeline.gone)]
    return tuple(absent(state.recorded, seen).values()) if state.snapshot.complete else ()


def is_of_host(state: AgentState) -> bool:
    """Whether no card of the node can be used, and several have failed or left.

    Whatever the mix of causes, driver and host are looked at first.
    """
    flapping = state.trends.of(TrendKind.FLAPPING)
    cards = state.snapshot.cards
    failed = [card for card in cards if is_fenced(card) or card.id in flapping]
    usable = any(
        card not in failed and card.id not in state.cordons and not state.is_disabled(card)
        for card in cards
    )
    return not usable and len(failed) + len(missed(state)) > 1


def _unhealthy(state: AgentState) -> Iterator[Problem]:
    """Yields cards out of service, each cause once, those that Pods hold first."""
    flapping = state.trends.of(TrendKind.FLAPPING)
    alike = by_cause(
        card
        for card in state.snapshot.cards
        if is_fenced(card) and card.id not in flapping and not is_served_by_person(card, state)
    )
    if alike and is_of_host(state):
        yield _of_all(alike, state)
        return
    yield from sorted(
        (_of_one_cause(cards, state) for cards in alike), key=lambda problem: not problem.pods
    )


def _of_one_cause(cards: Sequence[CardState], state: AgentState) -> Problem:
    first = cards[0].health
    return Problem(
        "CardUnhealthy",
        named(cards),
        state.pods_of(cards),
        {"why": first, "nodes": nodes_of(cards)},
        cause=first.cause,
        since=min(card.health.since for card in cards),
    )


def _of_all(alike: Sequence[Sequence[CardState]], state: AgentState) -> Problem:
    """One problem of all unhealthy cards; its cause is the most frequent one."""
    cards = [card for group in alike for card in group]
    most = max(alike, key=len)[0].health
    causes = tuple(
        Message("CardsFail", named(group), facts={"why": group[0].health}) for group in alike
    )
    return Problem(
        "AllCardsUnhealthy",
        named(cards),
        state.pods_of(cards),
        {"why": most if len(alike) == 1 else causes, "nodes": nodes_of(cards)},
        cause=most.cause,
        since=min(card.health.since for card in cards),
        of_host=True,
    )


def missed(state: AgentState) -> list[GoneCard]:
    """Returns the cards that left and are still a problem by name; the others are notes."""
    return [
        gone
        for gone in state.missing
        if (TrendKind.FLAPPING, gone.state.id) in state.trends.found
        or gone.state.id in state.pods_of_gone
        or (state.monotonic - gone.since < MISSED and state.cordon_of_gone(gone) is None)
    ]


def _gone(state: AgentState) -> Iterator[Problem]:
    """Yields cards that left, those that Pods hold first, and Pods with missing devices."""
    missing = missed(state)
    of_host = is_of_host(state)
    held = state.pods_of_gone
    flapping = state.trends.of(TrendKind.FLAPPING)
    steady = [gone for gone in missing if gone.state.id not in flapping]
    if used := [gone for gone in steady if gone.state.id in held]:
        pods = (pod for gone in used for pod in held[gone.state.id])
        yield _left(used, tuple(dict.fromkeys(pods)), of_host=of_host)
    if free := [gone for gone in steady if gone.state.id not in held]:
        yield _left(free, (), of_host=of_host)
    names = {gone.state.id for gone in missing}
    if unknown := [device for device in state.gone if device.card_id not in names]:
        yield Problem(
            "DeviceMissing",
            pods=tuple(dict.fromkeys(device.assignment.pod_name for device in unknown)),
            facts={"devices": tuple(dict.fromkeys(device.name for device in unknown))},
            of_host=of_host or not state.snapshot.cards,
        )


def _left(cards: Sequence[GoneCard], pods: tuple[str, ...], *, of_host: bool) -> Problem:
    """Cards that left; Pods hold each of them, or none."""
    pci = cards[0].state.card.pci_bus_id if len(cards) == 1 else None
    return Problem(
        "AllCardsMissing" if of_host else "CardMissing",
        named(gone.state for gone in cards),
        pods,
        {"pci": pci or ""},
        since=min(gone.since for gone in cards),
        of_host=of_host,
    )


def _replaced(state: AgentState) -> Iterator[Problem]:
    """Yields Pods that were given a card in whose place there is another one now."""
    for card in state.snapshot.cards:
        usages = state.usages_of(card)
        pods = [use.assignment.pod_name for use in usages if _is_of_another(use.assignment, card)]
        for claim in (claim for driver in state.dra for claim in driver.claims):
            if any(_contradicts(device.footprint, card) for device in claim.devices):
                pods += [f"{claim.namespace}/{pod}" for pod in claim.pods]
        if pods:
            yield Problem("CardReplaced", named([card]), tuple(dict.fromkeys(pods)))


def _is_of_another(assignment: Assignment, state: CardState) -> bool:
    """Whether the device plugin gave out this ID for another card in the same place."""
    card = state.card
    device = assignment.device
    by_number = device.startswith(f"{card.family}-") or not (card.uuid or card.serial)
    return not (assignment.claim or by_number or footprints_of(device, [card]))


def _contradicts(footprint: Footprint, card: CardState) -> bool:
    keys = keys_of(card.card)
    return bool(footprint.keys & keys) and contradict(footprint.keys, keys)


def _fewer(state: AgentState) -> Iterator[Problem]:
    """Yields that there are fewer cards than before the start, or than the config says."""
    here = len(state.snapshot.cards)
    is_recent = state.monotonic - state.started_at < MISSED
    before = earlier_cards(state) if is_recent else ()
    if before:
        yield Problem("EarlierCardMissing", facts={"earlier": before}, since=state.started_at)
    missing = len(before) + len(missed(state))
    expected = state.expected_cards or 0
    if state.snapshot.complete and here + missing < expected:
        yield Problem("FewerCardsThanExpected", facts={"here": here, "expected": expected})


def _hot(working: Sequence[CardState], state: AgentState) -> Iterator[Problem]:
    hot = [card for card in working if is_hot(card, state)]
    very_hot = [card for card in hot if is_above(card, VERY_HOT)]
    yield from _lasting(TrendKind.HOT, very_hot, state, "CardVeryHot")
    yield from _lasting(TrendKind.HOT, [card for card in hot if card not in very_hot], state)


def _stale(working: Sequence[CardState], state: AgentState) -> Iterator[Problem]:
    stale = [card for card in working if state.is_stale(card)]
    if stale:
        since = min(card.reading.at for card in stale if card.reading)
        yield Problem("ReadingsStale", named(stale), state.pods_of(stale), since=since)


def _lasting(
    trend_kind: TrendKind,
    cards: Sequence[CardState],
    state: AgentState,
    kind: Kind | None = None,
) -> Iterator[Problem]:
    """Yields one problem for those of the cards that have a trend, if any."""
    trends = state.trends.of(trend_kind)
    flaps = trend_kind is TrendKind.FLAPPING
    cards = [
        card
        for card in cards
        if card.id in trends and not (flaps and is_served_by_person(card, state))
    ]
    if not cards:
        return
    away = (pod for card in cards for pod in state.pods_of_gone.get(card.id, ()))
    yield Problem(
        kind or TRENDS[trend_kind],
        named(cards),
        tuple(dict.fromkeys((*state.pods_of(cards), *away))),
        {
            "details": tuple(_detail(trend_kind, card, trends[card.id]) for card in cards),
            "nodes": nodes_of(cards),
        },
        since=min(trends[card.id].since for card in cards),
    )


def _detail(kind: TrendKind, card: CardState, trend: Trend) -> Detail:
    """What is so now; as it began where that is not known."""
    reading = card.reading
    if kind is TrendKind.HOT and reading:
        return (Message("Temperature", facts={"celsius": reading.temperature()}),)
    if kind is TrendKind.ERRORS and reading:
        text = (trend.counted and ", ".join(counted(card))) or reading.error_text
        return (text,) if text else trend.detail
    return trend.detail
