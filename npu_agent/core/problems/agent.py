"""Rules that find problems of the agent: kubelet, API server, files. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from npu_agent.core.cordon import unknown as unknown_cordons
from npu_agent.core.kinds import TRAITS, Kind, Message, Problem
from npu_agent.core.offer import advertise, names
from npu_agent.core.state import (
    AgentState,
    DraState,
    SessionPhase,
    SessionStatus,
)

_NOT_REGISTERED: tuple[Kind, Kind] = ("ResourceNotRegistered", "DRANotRegistered")
"""Kinds whose one origin is a kubelet that is away."""


def problems(state: AgentState) -> Iterator[Problem]:
    """Yields problems of the agent; one for all that wait for the API server."""
    served = _served(state)
    has_kubelet = not any(problem.kind in _NOT_REGISTERED for problem in served)
    every = [
        *served,
        *_of_config(state),
        *_of_allocation(state, has_kubelet),
        *_of_the_node(state),
        *_of_evictions(state),
        *_of_the_host(state),
    ]
    waiting = [problem for problem in every if TRAITS[problem.kind].waits]
    if not state.api_error or not waiting:
        yield from every
        return
    away = Problem(
        "APIServerAway",
        facts={"error": state.api_error, "served": not state.auto_pending_reason},
        parts=tuple(waiting),
    )
    yield from _merged(every, waiting, away)


def _merged(
    every: Sequence[Problem], alike: Sequence[Problem], merged: Problem
) -> Iterator[Problem]:
    """Yields one problem in the place of those that are alike."""
    for problem in every:
        if problem is alike[0]:
            yield merged
        elif problem not in alike:
            yield problem


def _served(state: AgentState) -> list[Problem]:
    """Returns resources and drivers that new Pods do not get; one if the kubelet is away."""
    every: list[Problem] = []
    for resource in state.resources:
        if not state.snapshot.complete or _has_cards(resource.session, state):
            every += _unserved(_NOT_REGISTERED[0], resource.session, state)
    for driver in state.dra:
        every += _unserved(_NOT_REGISTERED[1], driver.session, state)
        every += _of_slices(driver)
    away = [problem for problem in every if problem.kind in _NOT_REGISTERED]
    if len(away) < 2:
        return every
    return [*_merged(every, away, replace(away[0], parts=tuple(away[1:])))]


def _has_cards(session: SessionStatus, state: AgentState) -> bool:
    """Computed from the hardware: a session gets its cards a moment after they were found."""
    return session.phase not in (SessionPhase.NO_CARDS, SessionPhase.REGISTERING) or any(
        advertise(state.snapshot, resource, state.disabled)
        for resource in state.wanted
        if resource.name == session.resource
    )


def _unserved(kind: Kind, session: SessionStatus, state: AgentState) -> Iterator[Problem]:
    """Yields why a resource or driver is not served, if it is not."""
    is_dra = kind == "DRANotRegistered"
    phase = session.phase
    match phase:
        case SessionPhase.REGISTERED | SessionPhase.STANDBY:
            return
        case SessionPhase.WAITING | SessionPhase.BLOCKED:
            kind = "DRABlocked" if is_dra else "ResourceBlocked"
        case SessionPhase.NO_CARDS | SessionPhase.REGISTERING:
            phase = SessionPhase.REGISTERING
            if not state.snapshot.complete:
                kind = "DRASearching" if is_dra else "ResourceSearching"
    facts = {
        "service": session.resource,
        "phase": phase,
        "again": bool(session.registrations) and phase is SessionPhase.REGISTERING,
        "reason": session.reason,
    }
    yield Problem(kind, facts=facts, since=session.since)


def _of_slices(driver: DraState) -> Iterator[Problem]:
    """Yields why the scheduler does not see all cards of a registered driver."""
    phase = driver.session.phase
    slices = driver.slices
    facts = {"service": driver.name, "trouble": slices.trouble}
    if phase is SessionPhase.REGISTERED and not slices.published:
        yield Problem("SlicesNotPublished" if slices.trouble else "SlicesPending", facts=facts)
    elif phase in (SessionPhase.REGISTERED, SessionPhase.STANDBY) and slices.incomplete:
        yield Problem("SlicesIncomplete", facts=facts)
    if slices.foreign:
        yield Problem("SlicesForeign", facts={**facts, "foreign": slices.foreign})


def _of_config(state: AgentState) -> Iterator[Problem]:
    if state.config.errors:
        yield Problem("ConfigRefused", facts={"error": state.config.errors[0]})
    if state.tls is None:
        return
    expires_at = state.tls.expires_at
    facts: dict[str, object] = {"error": state.tls.error or "", "silent": not state.tls.error}
    if expires_at is None:
        yield Problem("CertificateMissing", facts=facts)
    elif expires_at < state.now:
        since = state.monotonic - (state.now - expires_at)
        yield Problem("CertificateExpired", facts=facts, since=since)
    elif state.tls.error:
        yield Problem("CertificateRefused", facts=facts)


def _of_allocation(state: AgentState, has_kubelet: bool) -> Iterator[Problem]:
    """Yields what is not known about devices."""
    if state.assignments_error is not None and has_kubelet:
        yield Problem(
            "AssignmentsUnknown",
            facts={"error": state.assignments_error, "served": not state.auto_pending_reason},
        )
    if state.auto_pending_reason and state.snapshot.cards:
        yield Problem("APIUndecided", facts={"error": state.auto_pending_reason})


def _of_the_node(state: AgentState) -> Iterator[Problem]:
    """Yields what is wrong with the Node in the API server."""
    left = set[str]().union(*(names(gone.state) for gone in state.missing))
    unknown = [name for name in state.cordons_lost if name.lower() not in left]
    lost = [unknown_cordons(unknown, state.snapshot)] if unknown else []
    for wrong in (*state.cordons_wrong, *lost):
        yield _with_commands(wrong, state)
    errors: Sequence[tuple[Kind, str | None]] = (
        ("NodeNotWatched", state.node_error),
        ("LabelsNotApplied", state.labels.error if state.labels else None),
        ("ConditionNotWritten", state.condition.error if state.condition else None),
        ("CDINotWritten", state.cdi_error),
    )
    for kind, error in errors:
        if error is not None:
            yield Problem(kind, facts={"error": error})


def _of_evictions(state: AgentState) -> Iterator[Problem]:
    """Yields why Pods of failed cards are not evicted: each reason once."""
    evictions = state.evictions
    if evictions.refusal:
        yield Problem("EvictionForbidden", facts={"error": evictions.refusal})
    reasons: list[Message] = []
    for waiting in evictions.waiting:
        if waiting.why not in reasons:
            reasons.append(waiting.why)
    for why in reasons:
        alike = [waiting for waiting in evictions.waiting if waiting.why == why]
        yield Problem(
            "EvictionWaits",
            tuple(dict.fromkeys(waiting.card for waiting in alike)),
            tuple(waiting.pod for waiting in alike),
            {"why": why},
        )


def _with_commands(problem: Problem, state: AgentState) -> Problem:
    """Adds the commands for a cordon that is wrong, as its reader can type them."""
    facts = problem.facts
    node = state.node or "NODE"
    card = str(facts.get("meant", facts.get("name", "")))
    service = partial(state.invocation.service, node=node)
    commands = {
        "cordon": service("cordon", card, f"--reason={facts.get('reason', '')}"),
        "uncordon": service("uncordon", card),
    }
    return replace(problem, facts={**facts, **commands, "node": node})


def _of_the_host(state: AgentState) -> Iterator[Problem]:
    unread: dict[str, list[str]] = {}
    for skipped in state.snapshot.skipped:
        if skipped.unread:
            unread.setdefault(skipped.reason, []).append(skipped.entry)
    for reason, entries in unread.items():
        yield Problem("EntryUnreadable", facts={"entries": tuple(entries), "error": reason})
    if state.snapshot.missing_nodes:
        yield Problem("HostNodeMissing", facts={"missing": state.snapshot.missing_nodes})
