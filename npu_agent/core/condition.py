"""The Node condition: AgentState -> status, reason and message. Pure.

Repair systems act on the status and on how long it has lasted; people read the message. So the
status changes for what takes work away from the node, and never for what one should only know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from npu_agent.core.advice import TRENDS, by_cause, plain_reason
from npu_agent.core.hardware import CardState
from npu_agent.core.problems import problems
from npu_agent.core.state import AgentState, is_fenced
from npu_agent.core.trends import TrendKind
from npu_agent.text import listed

NO_CARDS = "NoCards"
_NAMED = 4
"""Cards that a message names; more are counted."""
_LONGEST = 1000
"""Characters of a message."""
_SERVICES = {"resource": "NotRegistered", "dra": "DRANotServed", "cdi": "CDINotWritten"}
"""By the subject of a problem that keeps Pods from getting their cards: its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCondition:
    """A condition of the Node, as the agent sees it now."""

    status: bool
    reason: str
    """In CamelCase: ``CardUnhealthy``."""
    message: str
    transient: bool = False
    """Whether it may be over in seconds: a restart of kubelet or agent looks the same."""


def usable(state: AgentState) -> int:
    """How many cards are healthy, or out of service because a person wants that."""
    return sum(_excused(card, state) or not is_fenced(card) for card in state.snapshot.cards)


def condition(state: AgentState, seen: int) -> NodeCondition | None:
    """The condition; None before the cards are known.

    `seen` is the most cards that were `usable` at a time since the Node booted.
    """
    if not state.snapshot.complete:
        return None
    healthy, expected = usable(state), state.expected_cards
    wanted = seen if expected is None else expected
    fenced = [*_fenced(state)]
    gone = [card.state.card.name for card in state.missing] if healthy < wanted else []
    services = [note for note in problems(state) if note.unready and note.subject in _SERVICES]
    degraded = [
        f"{card.card.name} {TRENDS[kind].begins}: {state.trends.found[kind, card.id].detail}"
        for card in state.snapshot.cards
        for kind in TrendKind
        if (kind, card.id) in state.trends.found and not is_fenced(card)
    ]
    said = [f"{healthy} of {wanted} cards are healthy", *fenced]
    if gone:
        said.append(f"{listed(gone, _NAMED)}: gone from the host")
    said += [note.text for note in services]
    if expected is None and not wanted:
        reason, said[0] = NO_CARDS, "no healthy card has been seen since the Node booted"
    elif healthy < wanted:
        reason = "CardUnhealthy" if fenced else "CardMissing" if gone else "TooFewCards"
    elif services:
        reason = _SERVICES[services[0].subject]
    else:
        reason = "NPUsDegraded" if fenced or degraded else "NPUsReady"
    if reason == "TooFewCards":
        said.append(
            f"the host has shown {seen} since it booted: check the bus with `lspci` on the node, "
            "or correct health.expectedCards"
        )
    said += degraded
    said += (
        f"{card.card.name} is cordoned: {state.cordons[card.id]}"
        for card in state.snapshot.cards
        if card.id in state.cordons
    )
    if state.maintenance:
        said.append(f"the Node is under maintenance: {state.maintenance}")
    message = "; ".join(said)
    return NodeCondition(
        status=reason in ("NPUsReady", "NPUsDegraded"),
        reason=reason,
        message=message if len(message) <= _LONGEST else message[: _LONGEST - 1] + "…",
        transient=reason in _SERVICES.values(),
    )


_LIFECYCLE = (
    "MaintenancePlanned",
    "MaintenanceInProgress",
    "DrainInProgress",
    "Drained",
    "GracefulNodeShutdownInProgress",
)
"""Conditions by which people say that they work on a Node: KEP-5683."""


def maintenance(conditions: Mapping[str, str], *, unschedulable: bool) -> str:
    """Describes maintenance of the Node for people; empty: none.

    Args:
        conditions: of the Node: by type, the status.
        unschedulable: whether the Node is cordoned.
    """
    phases = [type_ for type_ in _LIFECYCLE if conditions.get(type_) == "True"]
    return ", ".join([*phases, *(["the Node is cordoned"] if unschedulable else [])])


def _fenced(state: AgentState) -> Iterator[str]:
    """Describes the cards out of service, each cause once, with their Pods."""
    fenced = (card for card in state.snapshot.cards if is_fenced(card))
    for cards in by_cause(card for card in fenced if not _excused(card, state)):
        pods, why = state.pods_of(cards), plain_reason(cards[0].health)
        held = f", held by {listed(pods, _NAMED)}" if pods else ""
        yield f"{listed((card.card.name for card in cards), _NAMED)}: {why}{held}"


def _excused(card: CardState, state: AgentState) -> bool:
    """Whether a person has taken the card out of service: that is nothing to repair."""
    return state.is_disabled(card) or card.id in state.cordons
