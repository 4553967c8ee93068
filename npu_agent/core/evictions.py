"""Which Pods should end because their card has failed, and why none does yet. Pure.

Start reading at `judge`. A Pod whose card is dead runs on, and nothing else of Kubernetes ends it:
the kubelet subtracts the device and no more (kubernetes/kubernetes#60388).

No Pod may end in doubt. A card counts once it has been unhealthy, or gone, for long enough without
a break. Never does one that is degraded, one whose health is unknown, or one that a person works
on. Where most cards fail together it is the driver or the host, and another card would not help:
they come back one after the other, and each has its time for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from npu_agent.core.kinds import Message, NamedCard
from npu_agent.core.ledger import Assignment
from npu_agent.core.plan import Facts
from npu_agent.core.problems.cards import is_of_host
from npu_agent.core.state import AgentState, is_fenced
from npu_agent.core.trends import TrendKind

TOGETHER = 60.0
"""Seconds: if most cards of a node fail within them, they have one cause."""


@dataclass(frozen=True, slots=True)
class FailedCard:
    """A card that is unhealthy or gone."""

    card: NamedCard
    since: float
    """By `time.monotonic`; of a card that this agent never saw, when that was noticed."""
    present: bool
    """False: it is gone, and its devices are in no ResourceSlice that could have a taint."""


@dataclass(frozen=True, slots=True)
class DoomedPod:
    """A Pod that holds a core of a failed card."""

    name: str
    """``namespace/pod``."""
    failed: FailedCard
    """The first of them that failed."""
    uids: frozenset[str]
    """Those of the Pods that may be meant, as the kubelet has them; empty: it has not said."""
    claims: frozenset[str] = frozenset()
    """The ResourceClaims, in its namespace, by which it holds cards that are present."""
    by_taint: bool = False
    """Whether it holds failed cards by these claims alone: a taint reaches who names a claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done for Pods on failed cards."""

    cards: frozenset[str] = frozenset()
    """The IDs of present cards whose Pods are to end now."""
    pods: tuple[DoomedPod, ...] = ()
    """The Pods of these cards and of those that are gone, who waited longest first."""
    withheld: Message | None = None
    """Why no Pod ends, even if there are `pods`."""
    next_at: float | None = None
    """When the next card will have failed for long enough; None: no other one has failed."""


def unseen_cards(state: AgentState) -> set[str]:
    """The IDs of cards that Pods hold, and that were gone before this agent saw them.

    For a moment, also one that has just left: the timeline follows the hardware.
    """
    seen = {gone.state.id for gone in state.timeline.gone}
    return {device.card_id for device in state.gone} - seen


def judge(
    state: AgentState,
    facts: Facts,
    after: float,
    unseen: Mapping[str, float] = MappingProxyType({}),
    calm_since: float = -math.inf,
) -> Decision:
    """Returns what is to be done now.

    Args:
        state: the agent and its node.
        facts: what of the ledger the state does not show.
        after: seconds for which a card has to have failed.
        unseen: when each of the `unseen_cards` was noticed.
        calm_since: when the last `disturbance` was over; no card's time begins earlier.
    """

    def due_at(failed: FailedCard) -> float:
        return max(failed.since, calm_since) + after

    if not state.snapshot.complete:
        return Decision()
    failed = sorted((*_unhealthy(state), *_gone(state, unseen)), key=lambda card: card.since)
    due = [card for card in failed if due_at(card) <= state.monotonic]
    next_at = min((due_at(card) for card in failed if card not in due), default=None)
    pods = tuple(_doomed(due, state, facts))
    withheld = _withheld(state, facts)
    present = () if withheld else (failed.card.id for failed in due if failed.present)
    return Decision(cards=frozenset(present), pods=pods, withheld=withheld, next_at=next_at)


def _unhealthy(state: AgentState) -> Iterator[FailedCard]:
    twins = state.trends.of(TrendKind.TWINS)
    for card in state.snapshot.cards:
        of_person = card.id in state.cordons or state.is_disabled(card)
        # Of two cards with one UUID, it is not clear whose Pod is whose.
        if is_fenced(card) and not of_person and card.id not in twins:
            yield FailedCard(NamedCard.of(card), card.health.since, present=True)


def _gone(state: AgentState, unseen: Mapping[str, float]) -> Iterator[FailedCard]:
    """Yields cards that Pods hold: those that left, and those that this agent never saw."""
    left = {gone.state.id: gone for gone in state.timeline.gone}
    names = {device.card_id: device.name for device in state.gone}
    for id_, name in names.items():
        gone = left.get(id_)
        if gone and state.cordon_of_gone(gone) is None:
            yield FailedCard(NamedCard.of(gone.state), gone.since, present=False)
        elif gone is None and not state.cordons_lost:  # which may mean this card
            since = unseen.get(id_, state.monotonic)
            yield FailedCard(NamedCard(id_, name), since, present=False)


def disturbance(state: AgentState) -> Message | None:
    """What befalls the whole node: its cards come back when it is over, or soon after."""
    if is_of_host(state) or _together(state):
        return Message("EvictionOfHost")
    if state.maintenance:
        return Message("EvictionInMaintenance", facts={"reason": state.maintenance})
    return None


def _withheld(state: AgentState, facts: Facts) -> Message | None:
    """Why no Pod ends now, whatever has failed."""
    if disturbed := disturbance(state):
        return disturbed
    unclear = facts.recovering or facts.ledger.unreadable
    if unclear or state.assignments_error is not None:
        return Message("EvictionInDoubt")
    return None


def _together(state: AgentState) -> bool:
    """Whether most cards failed within a minute of each other, and have not recovered."""
    times = sorted(
        (
            *(card.health.since for card in state.snapshot.cards if is_fenced(card)),
            *(gone.since for gone in state.missing),
        )
    )
    most = (len(state.snapshot.cards) + len(state.missing)) // 2 + 1
    return most > 1 and any(
        last - first <= TOGETHER for first, last in zip(times, times[most - 1 :], strict=False)
    )


def _doomed(due: Iterable[FailedCard], state: AgentState, facts: Facts) -> Iterator[DoomedPod]:
    """Yields the Pods that hold cores of these cards, each once."""
    uses: dict[str, list[tuple[FailedCard, Assignment]]] = {}
    for failed in due:
        for assignment in _holders(failed, state):
            if assignment.pod:
                uses.setdefault(assignment.pod_name, []).append((failed, assignment))
    tainted = not any(driver.slices.untainted for driver in state.dra)
    for name, pairs in uses.items():
        reached = [use for failed, use in pairs if use.claim and failed.present and tainted]
        yield DoomedPod(
            name,
            pairs[0][0],
            frozenset().union(*(_uids(use, facts) for _, use in pairs)),
            frozenset(use.claim for use in reached),
            by_taint=len(reached) == len(pairs),
        )


def _holders(failed: FailedCard, state: AgentState) -> list[Assignment]:
    id_ = failed.card.id
    if failed.present:
        return [usage.assignment for usage in state.usages if usage.card_id == id_]
    return [device.assignment for device in state.gone if device.card_id == id_]


def _uids(use: Assignment, facts: Facts) -> frozenset[str]:
    """The UIDs of the Pods that the kubelet has for a device or a claim."""
    if not use.claim:
        allocation = facts.ledger.allocations.get(use.name)
        return allocation.pod_uids if allocation else frozenset()
    return frozenset(
        uid
        for claim in facts.ledger.prepared.values()
        if (claim.namespace, claim.name) == (use.namespace, use.claim)
        for uid in claim.pod_uids
    )
