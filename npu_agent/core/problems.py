"""Problems of node and agent with remedies: the one answer to "is all well?".

`problems` wait for a person, the most harmful first; `unready` are those of them that keep the
agent from being ready; `notes` are out of the ordinary and no fault. Page, status.json, /readyz and
doctor show them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from npu_agent.core.advice import (
    GONE,
    KUBELET,
    TRENDS,
    UNREADABLE,
    advice,
    by_cause,
    device_paths,
    plain_reason,
    typed,
)
from npu_agent.core.cordon import unknown as unknown_cordons
from npu_agent.core.hardware import CardState, Cause, HealthState, by_kind
from npu_agent.core.ledger import Assignment, Footprint, contradict, footprints_of, keys_of
from npu_agent.core.offer import advertise, names
from npu_agent.core.state import AgentState, DraState, SessionPhase, SessionStatus, is_fenced
from npu_agent.core.timeline import GoneCard
from npu_agent.core.trends import VERY_HOT, Trend, TrendKind, is_above
from npu_agent.text import NAMED, listed, natural

Subject = Literal[
    "card",
    "resource",
    "dra",
    "assignments",
    "config",
    "labels",
    "node",
    "condition",
    "hardware",
    "cdi",
]
Severity = Literal["critical", "warning", "info"]
"""Severities of the alerts: Pods lose NPUs now; this working day; for information."""
_SEVERITIES: Sequence[Severity] = ("critical", "warning", "info")

_MISSED = 6 * 3600.0
"""Seconds for which a card that left is a problem, as the alert has it; later it is a note."""


@dataclass(frozen=True, slots=True)
class Note:
    """A remark for people: one cause is one Note."""

    subject: Subject
    text: str
    """What comes before the first ``: `` says it in short."""
    cards: tuple[str, ...] = ()
    """The IDs of the present cards that it concerns."""
    remedy: str = ""
    """The remedy; empty where there is none, or the text has it."""
    runbook: str = ""
    """The section of the runbook that has the steps: ``npucardunhealthy``; may be empty."""
    unready: str = ""
    """What /readyz says; empty: the agent is ready in spite of it."""
    severity: Severity = field(default="warning", kw_only=True)
    since: float | None = field(default=None, kw_only=True)
    """When it began; None where that is not known."""
    pods: tuple[str, ...] = field(default=(), kw_only=True)
    """The affected Pods, ``namespace/pod``."""
    command: str = field(default="", kw_only=True)
    """The first command for it, at a desk or on the node; empty where there is none."""
    last_command: str = field(default="", kw_only=True)
    """The command that deletes its Pods, if nothing else helps; empty where there are none."""
    waits: str = field(default="", kw_only=True)
    """What the agent does not do until the API server answers, as a clause; else empty."""

    @property
    def card(self) -> str | None:
        """The ID of the card that it is about, or of the first one."""
        return self.cards[0] if self.cards else None

    @property
    def short(self) -> str:
        """``npu0 is unhealthy``: for a headline."""
        return self.text.partition(": ")[0].partition("\n")[0]


def problems(state: AgentState) -> tuple[Note, ...]:
    """Returns the problems that need a person, the most harmful first."""
    notes = (_typed(note, state) for note in (*_of_the_agent(state), *_of_cards(state)))
    return tuple(sorted(notes, key=lambda note: (_SEVERITIES.index(note.severity), _late(note))))


def _typed(note: Note, state: AgentState) -> Note:
    return replace(note, command=typed(note.command, state.invocation, state.node))


def _late(note: Note) -> bool:
    """Whether it comes after all of its severity that are about cards."""
    return note.severity != "critical" and note.subject != "card"


def unready(state: AgentState) -> tuple[str, ...]:
    """Returns the reasons why the agent is not ready; empty when it is.

    It is ready when the kubelet holds every resource that has cards open, or when another instance
    of the agent serves it (a rolling update with maxSurge waits for the new one to be ready before
    it ends the old one), and when the config file that is there is the one in force. Keys that
    wait for a restart do not count: only a restart would help, and that is the user's decision.
    """
    return tuple(note.unready for note in problems(state) if note.unready)


def _of_cards(state: AgentState) -> Iterator[Note]:
    """Yields problems of cards, by harm within a severity."""
    cards, flapping = state.snapshot.cards, state.trends.of(TrendKind.FLAPPING)
    fenced = (card for card in cards if is_fenced(card) and card.id not in flapping)
    causes = by_cause(card for card in fenced if not _served_by_person(card, state))
    unhealthy = (_unhealthy(alike, state) for alike in causes)
    yield from sorted(unhealthy, key=lambda note: not note.pods)
    yield from _gone(state)
    yield from _replaced(state)
    yield from _fewer(state)
    # One that flaps may be gone at this very moment.
    flaps = [card.card for card in flapping.values() if not _served_by_person(card.card, state)]
    yield from _lasting(TrendKind.FLAPPING, flaps, state)
    working = [card for card in cards if not is_fenced(card)]
    hot = [card for card in working if is_hot(card, state)]
    very_hot = [card for card in hot if is_above(card, VERY_HOT)]
    yield from _lasting(TrendKind.HOT, very_hot, state, very=True)
    yield from _lasting(TrendKind.HOT, [card for card in hot if card not in very_hot], state)
    if stale := [card for card in working if state.is_stale(card)]:
        yield Note(
            "card",
            f"the readings of {_names(stale)} are stale",
            _ids(stale),
            remedy="temperature, load and errors of it are unknown: see `dmesg` on the node; a "
            "read that hangs in the kernel needs the driver reloaded, or a reboot",
            runbook="npureadingsstale",
            since=min(card.reading.at for card in stale if card.reading),
            pods=state.pods_of(stale),
            command=advice(Cause.HANGS).command,
        )
    for kind in (TrendKind.ERRORS, TrendKind.LINK, TrendKind.SLOW):
        several = [card for card in working if (kind, card.id) in state.trends.found]
        yield from _lasting(kind, several, state)
    twins = state.trends.of(TrendKind.TWINS)
    for uuid in sorted({twin.detail for twin in twins.values()}):
        same = [card for card in cards if card.id in twins and card.card.uuid == uuid]
        yield from _lasting(TrendKind.TWINS, same, state)


def _served_by_person(card: CardState, state: AgentState) -> bool:
    """Whether a person works on the card already, and no Pod holds it: no alerts either."""
    return card.id in state.cordons and not state.usages_of(card)


def _lasting(
    kind: TrendKind, cards: Sequence[CardState], state: AgentState, *, very: bool = False
) -> Iterator[Note]:
    """Yields one entry for a trend of these cards, if any; `very`: they are very hot."""
    if not cards:
        return
    about, trends = TRENDS[kind], state.trends.of(kind)
    away = (pod for card in cards for pod in state.pods_of_gone.get(card.id, ()))
    pods = tuple(dict.fromkeys((*state.pods_of(cards), *away)))
    words = about.many if len(cards) > 1 else about.begins
    remedy, command = about.remedy, about.command.format(card=cards[0].card.name)
    if very:
        end = "no Pod holds it, so end the host's process"
        end = f"delete the Pods that hold it ({_LOST})" if pods else end
        words, remedy = words.replace("hot", "very hot"), f"stop the load now: {end}; {remedy}"
        paths = device_paths(card.card for card in cards[:NAMED])
        command = _delete(pods) if pods else f"fuser -v {paths}"
    details = {card.card.name: _detail(kind, card, trends[card.id]) for card in cards[:NAMED]}
    if len({*details.values()}) > 1:
        detail = "; ".join(f"{name} {detail}" for name, detail in details.items())
    else:
        detail = details[cards[0].card.name]
    present = {*_ids(state.snapshot.cards)}
    yield Note(
        "card",
        f"{_names(cards)} {words}: {detail}{_used(pods)}",
        _ids(card for card in cards if card.id in present),
        remedy=remedy,
        runbook="nputemperaturecritical" if very else about.runbook,
        severity="critical" if very else "warning",
        since=min(trends[card.id].since for card in cards),
        pods=pods,
        command=command,
    )


def _detail(kind: TrendKind, card: CardState, trend: Trend) -> str:
    """What is so now."""
    if kind is TrendKind.HOT and card.reading:
        return f"{card.reading.temperature():.1f} °C"
    if kind is TrendKind.ERRORS and card.reading:
        return (trend.counted and _counted(card)) or card.reading.error_text or trend.detail
    return trend.detail


_LOST = "a Pod without a controller does not come back"


def _names(cards: Sequence[CardState], everything: bool = False) -> str:
    """``npu0, npu1``; where they are all that there are, and many, ``64 cards``."""
    if everything and len(cards) > NAMED:
        return f"{len(cards)} cards"
    return listed(card.card.name for card in cards)


def _ids(cards: Iterable[CardState]) -> tuple[str, ...]:
    return tuple(card.id for card in cards)


def _used(pods: Sequence[str]) -> str:
    return f"; in use by {listed(sorted(pods, key=natural))}" if pods else ""


def _delete(pods: Sequence[str]) -> str:
    """The command that deletes Pods."""
    by_namespace = groupby(sorted(pods), lambda pod: pod.partition("/")[0])
    return " && ".join(
        shlex.join(
            ["kubectl", "delete", "pod", "-n", namespace, *(p.split("/", 1)[1] for p in own)]
        )
        for namespace, own in by_namespace
    )


def _unhealthy(cards: Sequence[CardState], state: AgentState) -> Note:
    """Cards of one cause."""
    pods, cause = state.pods_of(cards), advice(cards[0].health.cause)
    several, every = len(cards) > 1, len(cards) == len(state.snapshot.cards)
    are, why = "are" if several else "is", plain_reason(cards[0].health)
    text = f"{_names(cards, every)} {are} unhealthy: {why}"
    if several and every:
        text += f": {cause.shared}"
    remedy, command, last = cause.remedy, cause.command, ""
    if cards[0].health.cause is Cause.NODES:
        command = f"ls -l {device_paths(card.card for card in cards[:NAMED])}"
    if several and every and state.node:
        remedy = f"cordon the Node, so that new Pods go to other Nodes; then {remedy}"
        command = shlex.join(("kubectl", "cordon", state.node))
    elif pods:
        remedy += f"; if it does not recover, delete the Pods that hold it: {_LOST}"
        last = _delete(pods)
    return Note(
        "card",
        f"{text}{_used(pods)}",
        _ids(cards),
        remedy=remedy,
        runbook=cause.runbook,
        severity="critical",
        since=min(card.health.since for card in cards),
        pods=pods,
        command=command,
        last_command=last,
    )


def _missed(state: AgentState) -> list[GoneCard]:
    """Returns the cards that left and are still a problem by name; the others are notes."""
    return [
        gone
        for gone in state.missing
        if (TrendKind.FLAPPING, gone.state.id) in state.trends.found
        or gone.state.id in state.pods_of_gone
        or (state.monotonic - gone.since < _MISSED and state.cordon_of_gone(gone) is None)
    ]


def _gone(state: AgentState) -> Iterator[Note]:
    """Yields cards that left, those that Pods hold first, and Pods with missing devices."""
    missed, held = _missed(state), state.pods_of_gone
    flapping = state.trends.of(TrendKind.FLAPPING)
    steady = [gone for gone in missed if gone.state.id not in flapping]
    if used := [gone for gone in steady if gone.state.id in held]:
        yield _left(used, tuple(dict.fromkeys(pod for g in used for pod in held[g.state.id])))
    if free := [gone for gone in steady if gone.state.id not in held]:
        yield _left(free, ())
    named = {gone.state.id for gone in missed}
    if unknown := [device for device in state.gone if device.card_id not in named]:
        pods = tuple(dict.fromkeys(device.assignment.pod_name for device in unknown))
        names = tuple(dict.fromkeys(device.name for device in unknown))
        yield Note(
            "assignments",
            f"{', '.join(pods)} {'hold' if len(pods) > 1 else 'holds'} {', '.join(names)}, whose "
            f"card{'s are' if len(names) > 1 else ' is'} gone",
            remedy=f"delete the Pod if it hangs: its devices no longer exist; {_LOST}",
            runbook="npucardmissing",
            severity="critical",
            pods=pods,
            command=_delete(pods),
        )


def _left(cards: Sequence[GoneCard], pods: tuple[str, ...]) -> Note:
    """Cards that left; Pods hold each of them, or none."""
    states, pci = [gone.state for gone in cards], cards[0].state.card.pci_bus_id
    are, were = ("are", "they were") if len(cards) > 1 else ("is", "it was")
    then = f"; then delete the Pods that hold it: {_LOST}" if pods else ""
    return Note(
        "card",
        f"{_names(states)} {are} gone: {were} here while this agent ran{_used(pods)}",
        remedy=f"{GONE}{then}",
        runbook="npucardmissing",
        severity="critical" if pods else "warning",
        since=min(gone.since for gone in cards),
        pods=pods,
        command=f"lspci -s {pci}" if pci and len(cards) == 1 else "lspci",
        last_command=_delete(pods),
    )


def _replaced(state: AgentState) -> Iterator[Note]:
    """Yields Pods that were given a card in whose place there is another one now."""
    for card in state.snapshot.cards:
        usages = state.usages_of(card)
        pods = [use.assignment.pod_name for use in usages if _is_of_another(use.assignment, card)]
        for claim in (claim for driver in state.dra for claim in driver.claims):
            if any(_contradicts(device.footprint, card) for device in claim.devices):
                pods += [f"{claim.namespace}/{pod}" for pod in claim.pods]
        if pods := [*dict.fromkeys(pods)]:
            yield Note(
                "assignments",
                f"{', '.join(pods)} {'hold' if len(pods) > 1 else 'holds'} a card that was "
                f"replaced: {card.card.name} is another one now",
                (card.id,),
                remedy=f"delete the Pod: the card that it was given is gone; {_LOST}",
                runbook="npucardmissing",
                severity="critical",
                pods=tuple(pods),
                command=_delete(pods),
            )


def _is_of_another(assignment: Assignment, state: CardState) -> bool:
    """Whether the device plugin gave out this ID for another card in the same place."""
    card, device = state.card, assignment.device
    by_number = device.startswith(f"{card.family}-") or not (card.uuid or card.serial)
    return not (assignment.claim or by_number or footprints_of(device, [card]))


def _contradicts(footprint: Footprint, card: CardState) -> bool:
    keys = keys_of(card.card)
    return bool(footprint.keys & keys) and contradict(footprint.keys, keys)


def _before(state: AgentState) -> list[str]:
    """The cards that the agent before this one had, and this one has not seen."""
    seen = [*state.snapshot.cards, *(gone.state for gone in state.timeline.gone)]
    keys = frozenset[str]().union(*(keys_of(card.card) for card in seen))
    return [
        f"{id_} ({by_kind(identities)['pci']})" if "pci" in by_kind(identities) else id_
        for id_, identities in state.recorded.items()
        if state.snapshot.complete and not identities & keys
    ]


def _fewer(state: AgentState) -> Iterator[Note]:
    """Yields that there are fewer cards than before the start, or than the config says."""
    here, started = len(state.snapshot.cards), state.monotonic - state.started_at
    before = _before(state) if started < _MISSED else []
    if before:
        yield Note(
            "hardware",
            f"{listed(before)} {'were' if len(before) > 1 else 'was'} here before the "
            "restart of the agent, and is gone",
            remedy=GONE,
            runbook="npucardmissing",
            since=state.started_at,
            command="lspci",
        )
    missing = len(before) + len(_missed(state))
    if state.snapshot.complete and here + missing < (state.expected_cards or 0):
        yield Note(
            "hardware",
            f"{here} of {state.expected_cards} cards are here: health.expectedCards is "
            f"{state.expected_cards}",
            remedy=f"{GONE}; or correct health.expectedCards",
            runbook="npucardsfewerthanexpected",
            command="lspci",
        )


def is_hot(card: CardState, state: AgentState) -> bool:
    """Whether the card's temperature is a reason to act, fenced for it or not."""
    return card.id in state.trends.of(TrendKind.HOT) and not state.is_stale(card)


def _counted(card: CardState) -> str:
    """The error counters that are not 0: ``pcie_post_error 17``."""
    counters = card.reading.errors if card.reading else ()
    return ", ".join(f"{label} {count}" for label, count in counters if count)


_DOCTOR = "npu-agent doctor"


def _of_the_agent(state: AgentState) -> Iterator[Note]:
    """Yields problems of the agent; one entry for all that wait for the API server."""
    served = [*_served(state)]
    away = any(note.remedy is _KUBELET for note in served)
    notes = [
        *(*served, *_of_config(state), *_of_allocation(state, away)),
        *(*_of_the_node(state), *_of_the_host(state)),
    ]
    waiting = [note for note in notes if note.waits] if state.api_error else []
    what = ", ".join(note.waits for note in waiting)
    text = f"the API server does not answer: {state.api_error}; until it does, {what}"
    unready = text if any(note.unready for note in waiting) else ""
    remedy = "check the API server; the agent asks again by itself"
    if not state.auto_pending_reason:
        remedy += ", and cards are still served"
    return _merge(notes, waiting, text=text, unready=unready, remedy=remedy, since=None)


def _merge(notes: Iterable[Note], alike: Sequence[Note], **changes: Any) -> Iterator[Note]:
    """Replaces similar entries by one: the first, changed."""
    for note in notes:
        if note in alike[:1]:
            yield replace(note, **changes)
        elif note not in alike:
            yield note


def _served(state: AgentState) -> Iterator[Note]:
    """Yields resources and drivers that new Pods do not get; one entry if the kubelet is away."""
    notes: list[Note] = []
    for resource in state.resources:
        if not state.snapshot.complete or _has_cards(resource.session, state):
            notes += _unserved("resource", resource.session, state)
    for driver in state.dra:
        notes += _unserved("dra", driver.session, state)
        notes += _of_slices(driver)
    away = [note for note in notes if note.remedy is _KUBELET]
    text = "; ".join(note.unready if at else note.text for at, note in enumerate(away))
    return _merge(notes, away, text=text, unready="; ".join(note.unready for note in away))


def _of_config(state: AgentState) -> Iterator[Note]:
    if (error := state.config.error) is not None:
        first = error.partition("\n")[0]
        yield Note(
            "config",
            f"the config file is refused, the last good one stays in force: {first}",
            remedy="correct the file and check it: an agent restarted now would exit",
            runbook="npuconfigrejected",
            unready=f"config: {error}",
            command=shlex.join(("npu-agent", "config", "check", state.invocation.config_file))
            if state.invocation.config_file
            else "",
        )
    yield from _of_tls(state)


def _of_allocation(state: AgentState, away: bool) -> Iterator[Note]:
    """Yields what is not known about devices; `away`: the kubelet is."""
    if state.assignments_error is not None and not away:
        yield Note(
            "assignments",
            f"the assignments of devices to Pods are unknown: {state.assignments_error}",
            remedy="check that the kubelet's directory pod-resources is mounted into the agent's "
            "Pod" + ("" if state.auto_pending_reason else "; cards are still served"),
            runbook="log-lines",
            command=_DOCTOR,
        )
    if (why := state.auto_pending_reason) and state.snapshot.cards:
        text = f"allocation.api is auto, and which API it stands for is not known: {why}"
        yield Note(
            "dra",
            text,
            remedy="the agent asks again by itself, and offers no card until then",
            runbook="npudranotregistered",
            unready=text,
            severity="critical",
            command=_DOCTOR,
            waits="allocation.api: auto is not decided",
        )


def _of_the_node(state: AgentState) -> Iterator[Note]:
    """Yields what is wrong with the Node in the API server."""
    left = set[str]().union(*(names(gone.state) for gone in state.missing))
    unknown = [name for name in state.cordons_lost if name.lower() not in left]
    lost = [unknown_cordons(unknown, state.snapshot)] if unknown else []
    for wrong in (*state.cordons_wrong, *lost):
        remedy = wrong.remedy.replace(" NODE ", f" {state.node or 'NODE'} ")
        yield Note("node", wrong.what, remedy=remedy, runbook="log-lines", command=_DOCTOR)
    if state.node_error is not None:
        text = f"changes of the Node are not seen, cordons and labels: {state.node_error}"
        waits = "new cordons are not seen"
        yield Note("node", text, runbook="log-lines", command=_DOCTOR, waits=waits)
    if state.labels is not None and state.labels.error is not None:
        yield Note(
            "labels",
            f"the Node's labels are not applied: {state.labels.error}",
            runbook="npulabelsnotapplied",
            command=_DOCTOR,
            waits="the Node's labels are not written",
        )
    if state.condition is not None and state.condition.error is not None:
        yield Note(
            "condition",
            f"the Node's condition is not written: {state.condition.error}",
            runbook="npuconditionnotwritten",
            command=_DOCTOR,
            waits="the Node's condition is not written",
        )


def _of_the_host(state: AgentState) -> Iterator[Note]:
    if state.cdi_error is not None:
        text = f"the CDI specs cannot be written: {state.cdi_error}"
        yield Note(
            "cdi",
            text,
            remedy="let the agent write the host's /var/run/cdi: add k8s/components/cdi, or dra",
            runbook="log-lines",
            unready=text,
            severity="critical",
            command=_DOCTOR,
        )
    unread: dict[str, list[str]] = {}
    for entry in state.snapshot.skipped:
        if entry.unread:
            unread.setdefault(entry.reason, []).append(entry.entry)
    for reason, entries in unread.items():
        text = f"{listed(entries)} cannot be read: {reason}"
        runbook = "a-node-offers-no-npus-or-too-few"
        command = advice(None).command
        yield Note("hardware", text, remedy=UNREADABLE, runbook=runbook, command=command)


_AGAIN = "check what the agent needs with doctor; it retries by itself"
_KUBELET = (
    "check the kubelet with `systemctl status kubelet` on the node; the agent registers as soon "
    "as it is back"
)


def _has_cards(session: SessionStatus, state: AgentState) -> bool:
    """Computed from the hardware: a session gets its cards a moment after they were found."""
    return session.phase not in (SessionPhase.NO_CARDS, SessionPhase.REGISTERING) or any(
        advertise(state.snapshot, resource, state.disabled)
        for resource in state.wanted
        if resource.name == session.resource
    )


def _unserved(
    subject: Literal["resource", "dra"], session: SessionStatus, state: AgentState
) -> Iterator[Note]:
    """Yields why a resource or driver is not served, if it is not."""
    doing, remedy, command = session.phase.value, _KUBELET, KUBELET
    match session.phase:
        case SessionPhase.REGISTERED | SessionPhase.STANDBY:
            return
        case SessionPhase.WAITING | SessionPhase.BLOCKED:
            remedy, command = _AGAIN, _DOCTOR
        case SessionPhase.NO_CARDS | SessionPhase.REGISTERING if not state.snapshot.complete:
            doing, remedy, command = "registering: still searching for cards", "", ""
        case SessionPhase.NO_CARDS | SessionPhase.REGISTERING:
            doing = "registering again" if session.registrations else "registering"
    what = session.resource if subject == "resource" else f"DRA driver {session.resource}"
    why = _reasoned(f"{what}: {doing}", session)
    yield Note(
        subject,
        f"new Pods get no {why}" if subject == "resource" else why,
        remedy=remedy,
        runbook="npuresourcenotregistered" if subject == "resource" else "npudranotregistered",
        unready=why,
        severity="critical",
        since=session.since,
        command=command,
    )


def _of_slices(driver: DraState) -> Iterator[Note]:
    """Yields why the scheduler does not see all cards of a registered driver."""
    session, slices, what = driver.session, driver.slices, f"DRA driver {driver.name}"
    if session.phase is SessionPhase.REGISTERED and not slices.published:
        text = slices.trouble or f"{what}: its cards are not published yet"
        yield Note(
            "dra",
            text,
            runbook="npudraslicesnotpublished",
            unready=text,
            severity="critical",
            command=_DOCTOR,
            waits="its ResourceSlices are not published" if slices.trouble else "",
        )
    elif session.phase in (SessionPhase.REGISTERED, SessionPhase.STANDBY) and slices.incomplete:
        yield Note(
            "dra",
            f"{what}: its ResourceSlices are incomplete: the scheduler ignores this node's cards",
            remedy="find slices of other owners with doctor; the agent publishes missing slices "
            "by itself",
            runbook="npudrapoolincomplete",
            severity="critical",
            command=_DOCTOR,
        )
    if slices.foreign:
        yield Note(
            "dra",
            f"{what}: another client makes ResourceSlices for this node, in another pool "
            f"({slices.foreign})",
            remedy="find slices of other owners with doctor; delete them, and their owner's right "
            "to write them",
            runbook="npudrapreparefailing",
            command=_DOCTOR,
        )


def _of_tls(state: AgentState) -> Iterator[Note]:
    if state.tls is None:
        return
    expires_at, error = state.tls.expires_at, state.tls.error
    text, since = "the certificate of metrics.tls", None
    if expires_at is None:
        text = f"{text} is missing, metrics are not served: {error or 'it is not read yet'}"
    elif expires_at < state.now:
        text = f"{text} has expired: {error or 'renew it'}"
        since = state.monotonic - (state.now - expires_at)
    elif error:
        text = f"{text} is refused, the last good one is kept: {error}"
    else:
        return
    yield Note(
        "config",
        text,
        remedy="correct the Secret, or what renews it; the agent reads the files again",
        runbook="npucertificateinvalid",
        unready=text if expires_at is None else "",
        since=since,
        command=_DOCTOR,
    )


def _reasoned(text: str, session: SessionStatus) -> str:
    return f"{text}: {session.reason}" if session.reason else text


def notes(state: AgentState) -> Iterator[Note]:
    """Returns remarks that are not problems."""
    return (replace(_typed(note, state), severity="info") for note in _notes(state))


def _notes(state: AgentState) -> Iterator[Note]:
    lately = state.trends.of(TrendKind.ERRORS)
    if any(card.card.simulated for card in state.snapshot.cards):
        yield Note("hardware", "the cards are simulated: Pods that hold them get /dev/null")
    if state.maintenance:
        yield Note(
            "node", f"the Node is under maintenance: {state.maintenance}; alerts are suppressed"
        )
    for gone in state.missing:
        if gone.state.id in state.pods_of_gone:
            continue
        cordoned = state.cordon_of_gone(gone)
        if state.monotonic - gone.since >= _MISSED or cordoned is not None:
            text = f"{gone.state.card.name} is gone"
            text += "" if cordoned is None else f", cordoned: {cordoned}"
            yield Note("card", text, runbook="npucardmissing")
    if state.monotonic - state.started_at >= _MISSED and (before := _before(state)):
        text = f"{listed(before)}: here before the restart of the agent, and gone"
        yield Note("hardware", text, runbook="npucardmissing")
    for card in state.snapshot.cards:
        name = card.card.name
        if card.health.state is HealthState.UNKNOWN:
            yield Note("card", f"{name}: its health is unknown: {card.health.reason}", (card.id,))
        if card.id not in lately and (counted := _counted(card)):
            text = f"{name} has counted errors, none recently: {counted}"
            yield Note("card", text, (card.id,), runbook="npuerrorsrising")
        if (reason := state.cordons.get(card.id)) is not None:
            remedy, command = "this brings it back", f"npu-agent uncordon {name}"
            text = f"{name} is cordoned: {reason}"
            if is_fenced(card) and _served_by_person(card, state):
                text += f"; it is unhealthy: {plain_reason(card.health)}"
            yield Note(
                "card", text, (card.id,), remedy=remedy, runbook="npucardcordoned", command=command
            )
        if state.is_disabled(card):
            text, remedy = f"{name} is not offered: disabled in the config", ""
            first = state.first_ids.get(name, card.id)
            if name in state.disabled and first != card.id:
                text += f"; the card of this name was {first} before"
                remedy = "write UUIDs in `disabledDevices`: they stay with their cards"
            yield Note("card", text, (card.id,), remedy=remedy)
    for ids, limit in state.trends.alike:
        named = [card for card in state.snapshot.cards if card.id in ids]
        yield Note("card", f"{_names(named, everything=True)} all have one limit: {limit}", ids)
    if stray := [card for card in state.snapshot.cards if _stray_load(card, state) > _LOADED]:
        most = max(_stray_load(card, state) for card in stray)
        yield Note(
            "card",
            f"{_names(stray)} {'are' if len(stray) > 1 else 'is'} busy without a Pod: {most:.0f} % "
            "on the busiest core",
            _ids(stray),
            remedy="stop the host's process that has it open, or cordon the card",
            runbook="npuloadwithoutpod",
            command=f"fuser -v {device_paths(card.card for card in stray[:NAMED])}",
        )
    for resource in state.resources:
        for device in state.withheld(resource):
            yield Note("resource", f"{device.name} is withheld: {device.reason}")
    for driver in state.dra:
        if driver.slices.dropped:
            fields = ", ".join(driver.slices.dropped)
            text = f"the API server drops {fields} of our ResourceSlices: a feature gate is off"
            if driver.slices.uncounted:
                text += "; dra.partitions has no effect, and cards are offered whole"
            yield Note("dra", text)
        if driver.session.phase is SessionPhase.STANDBY:
            text = f"DRA driver {driver.session.resource} is on standby"
            yield Note("dra", _reasoned(text, driver.session))
    if state.config.waiting:
        text = f"waits for a restart of the agent: {', '.join(state.config.waiting)}"
        yield Note("config", text, runbook="npuconfigwaitsforrestart")
    labels = state.labels
    if labels is not None and not labels.in_place and labels.error is None and labels.labels:
        yield Note("labels", "the Node's labels are not applied yet")
    for served in state.resources:
        if served.session.phase is SessionPhase.STANDBY:
            text = f"{served.session.resource} is on standby"
            yield Note("resource", _reasoned(text, served.session))


_LOADED = 20.0
"""Per cent of a core's cycles from which on it works: as the alert has it."""


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
