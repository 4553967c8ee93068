"""Whether the agent does its job, and what somebody should know: pure functions of the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from npu_agent.core.advice import COOLING, UNREADABLE, advice, plain_reason
from npu_agent.core.api_mode import ApiMode, WantedApi
from npu_agent.core.hardware import CardState, HealthState
from npu_agent.core.ledger import Assignment
from npu_agent.core.offer import advertise
from npu_agent.core.state import AgentState, DraState, SessionPhase, SessionStatus, is_fenced
from npu_agent.core.trouble import Trouble, TroubleKind

Subject = Literal["card", "resource", "dra", "assignments", "config", "labels", "hardware", "cdi"]

HOT, VERY_HOT = 90.0, 100.0
"""°C above which a card is hot, and so hot that somebody should act now: as the alerts have it."""
_RISING = 900.0
"""Seconds for which a counted error is a problem, as the alert has it; later it is a note."""
_MISSED = 6 * 3600.0
"""The same for a card that left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that people should know, and what it is about."""

    subject: Subject
    text: str
    card: str | None = None
    """The ID of the card that it is about."""
    remedy: str = ""
    """What to do about it; empty where there is nothing to do, or the text has it."""
    runbook: str = ""
    """The section of the runbook that has the steps: ``npucardunhealthy``; may be empty."""


def unready(state: AgentState) -> tuple[Trouble, ...]:
    """What keeps the agent from being ready; empty when nothing does.

    It is ready when the kubelet holds every resource that has cards open, or when another instance
    of the agent serves it (a rolling update with maxSurge waits for the new one to be ready before
    it ends the old one), and when the config file that is there is the one in force. Keys that
    wait for a restart are no reason: only a restart would help, and that is the user's decision.
    """
    found = [_unserved(one.session, state) for one in state.resources]
    found += [_unserved_claims(one) for one in state.dra]
    if state.config.error is not None:
        found.append(Trouble(what="config", cause=state.config.error, kind=TroubleKind.CONFIG))
    if state.tls is not None and state.tls.expires_at is None:
        cause = state.tls.error or "the certificate is not read yet"
        found.append(Trouble(what="metrics.tls", cause=cause, kind=TroubleKind.CONFIG))
    if state.cdi_error is not None:
        found.append(Trouble(what="the CDI specs cannot be written", cause=state.cdi_error))
    return tuple(filter(None, found))


def _unserved(session: SessionStatus, state: AgentState) -> Trouble | None:
    """Why this resource is not served as it should be; None if it is."""
    doing, kind = session.phase.value, TroubleKind.REGISTRATION
    match session.phase:
        case SessionPhase.REGISTERED | SessionPhase.STANDBY:
            return None
        case SessionPhase.NO_CARDS | SessionPhase.REGISTERING:
            doing = "registering again" if session.registrations else "registering"
            if not state.snapshot.complete:
                doing, kind = "registering: still searching for cards", TroubleKind.STARTING
            elif not _has_cards(session.resource, state):
                return None
    return Trouble(what=f"{session.resource}: {doing}", cause=session.reason, kind=kind)


def _unserved_claims(driver: DraState) -> Trouble | None:
    """Why claims cannot be served as they should be; None if they can."""
    session, slices = driver.session, driver.slices
    if session.phase is SessionPhase.STANDBY:
        return None
    if session.phase is not SessionPhase.REGISTERED:
        return Trouble(
            what=f"DRA driver {driver.name}: {session.phase.value}",
            cause=session.reason,
            kind=TroubleKind.REGISTRATION,
        )
    if not slices.published:
        return slices.trouble or Trouble(
            what=f"DRA driver {driver.name}: its cards are not published yet",
            kind=TroubleKind.STARTING,
        )
    return None


def _has_cards(name: str, state: AgentState) -> bool:
    """Computed from the hardware: a session gets its cards a moment after they were found."""
    return any(
        state.places.get(device.card_id, ApiMode.PLUGIN).listed
        for resource in state.wanted
        if resource.name == name
        for device in advertise(state.snapshot, resource, state.disabled)
    )


def problems(state: AgentState) -> tuple[Note, ...]:
    """What somebody should see to; empty when all is well."""
    return (*_of_cards(state), *_of_the_agent(state))


def _of_cards(state: AgentState) -> Iterator[Note]:
    stale = []
    for card in state.snapshot.cards:
        if is_fenced(card):
            yield _unhealthy(card, state)
        elif state.is_stale(card):
            stale.append(card)
        elif is_hot(card, state):
            yield _hot(card)
    if stale:
        cards = ", ".join(card.card.name for card in stale)
        text = f"{cards}: readings are stale, no new ones arrive"
        remedy = (
            "temperature, load and errors of it are unknown: see `dmesg` on the node; a read that "
            "hangs in the kernel needs the driver reloaded, or a reboot"
        )
        yield Note(
            subject="card", card=stale[0].id, text=text, remedy=remedy, runbook="npureadingsstale"
        )
    lately = rising(state)
    for card in state.snapshot.cards:
        if card.id in lately:
            yield Note(
                subject="card",
                card=card.id,
                text=f"{card.card.name} counted new errors: {_counted(card)}",
                remedy="ask whether the Pods that hold it are well; once is no reason to act",
                runbook="npuerrorsrising",
            )
    for left in state.timeline.gone:
        if state.monotonic - left.since < _MISSED:
            yield Note(
                subject="card",
                text=f"{left.state.card.name} is gone: it was here while this agent ran",
                remedy="unless somebody removed it on purpose, `lspci` on the node shows whether "
                "the bus still has it, and `dmesg` why it left",
                runbook="npucardmissing",
            )
    for gone in state.gone:
        text = f"{_pod(gone)} holds {state.name_of_gone(gone)}, whose card is gone"
        remedy = "delete that Pod if it hangs: what it held is not there any more"
        yield Note(subject="assignments", text=text, remedy=remedy, runbook="npucardmissing")


def _unhealthy(card: CardState, state: AgentState) -> Note:
    users = dict.fromkeys(_pod(holding.assignment) for holding in state.usages_of(card))
    used = f"; in use by {', '.join(users)}" if users else ""
    found = advice(card.health.cause)
    remedy = found.remedy
    if users:
        remedy = f"delete the Pods that hold it, so that they get another card; {remedy}"
    return Note(
        subject="card",
        card=card.id,
        text=f"{card.card.name} is unhealthy: {plain_reason(card.health)}{used}",
        remedy=remedy,
        runbook=found.runbook,
    )


def is_hot(card: CardState, state: AgentState) -> bool:
    """Whether the card's present temperature is a reason to act, fenced for it or not."""
    temperature = card.reading.temperature() if card.reading else None
    limit = HOT if state.max_temperature is None else min(HOT, state.max_temperature)
    return temperature is not None and temperature > limit and not state.is_stale(card)


def _hot(card: CardState) -> Note:
    temperature = (card.reading and card.reading.temperature()) or 0.0
    very = temperature > VERY_HOT
    return Note(
        subject="card",
        card=card.id,
        text=f"{card.card.name} is {'very ' if very else ''}hot: {temperature:.1f} °C",
        remedy=f"take the load away now: delete the Pods that hold it; {COOLING}"
        if very
        else COOLING,
        runbook="nputemperaturecritical" if very else "nputemperaturehigh",
    )


def rising(state: AgentState) -> frozenset[str]:
    """The IDs of the cards whose error counters rose a short time ago."""
    return frozenset(
        one.card
        for one in state.timeline.entries(state.monotonic)
        if one.subject == "errors" and one.card and state.monotonic - one.at < _RISING
    )


def _counted(card: CardState) -> str:
    """The error counters that are not 0: ``pcie_post_error 17``."""
    counters = card.reading.errors if card.reading else ()
    return ", ".join(f"{label} {count}" for label, count in counters if count)


def _pod(holder: Assignment) -> str:
    return f"{holder.namespace}/{holder.pod}"


def _of_the_agent(state: AgentState) -> Iterator[Note]:
    for resource in state.resources:
        if trouble := _unserved(resource.session, state):
            yield Note(
                subject="resource",
                text=str(trouble),
                remedy=_unserved_remedy(resource.session, trouble),
                runbook="npuresourcenotregistered",
            )
    for driver in state.dra:
        if trouble := _unserved_claims(driver):
            published = driver.session.phase is SessionPhase.REGISTERED
            yield Note(
                subject="dra",
                text=str(trouble),
                remedy="" if published else _unserved_remedy(driver.session, trouble),
                runbook="npudraslicesnotpublished" if published else "npudranotregistered",
            )
        elif driver.slices.incomplete:
            yield Note(
                subject="dra",
                text=f"DRA driver {driver.name}: its pool is incomplete: no card of it is used",
                remedy="the agent publishes what is missing by itself; `npu-agent doctor` names "
                "slices that are somebody else's",
                runbook="npudrapoolincomplete",
            )
    if state.config.error is not None:
        first = state.config.error.partition("\n")[0]
        text = f"the config file is refused, the last good one stays in force: {first}"
        remedy = (
            "correct the file, and try it with `npu-agent config check FILE`: an agent that starts "
            "now would not come up"
        )
        yield Note(subject="config", text=text, remedy=remedy, runbook="npuconfigrejected")
    yield from _of_tls(state)
    if state.assignments_error is not None:
        text = f"the assignments of devices to Pods are unknown: {state.assignments_error}"
        remedy = (
            "cards are served all the same; is the kubelet's directory pod-resources mounted into "
            "the agent's Pod? `npu-agent doctor` there checks it"
        )
        yield Note(subject="assignments", text=text, remedy=remedy, runbook="log-lines")
    if state.labels is not None and state.labels.error is not None:
        text = f"the Node's labels are not applied: {state.labels.error}"
        yield Note(subject="labels", text=text, runbook="npulabelsnotapplied")
    if state.cdi_error is not None:
        text = f"the CDI specs cannot be written: {state.cdi_error}"
        yield Note(subject="cdi", text=text, runbook="log-lines")
    for odd in state.snapshot.skipped:
        if odd.unread:
            yield Note(
                subject="hardware",
                text=f"{odd.entry} cannot be read: {odd.reason}",
                remedy=UNREADABLE,
                runbook="a-node-offers-no-npus-or-too-few",
            )


def _unserved_remedy(session: SessionStatus, trouble: Trouble) -> str:
    if trouble.remedy or trouble.kind is TroubleKind.STARTING:
        return ""
    if session.phase in (SessionPhase.WAITING, SessionPhase.BLOCKED):
        return "the agent tries again by itself; `npu-agent doctor` in its Pod checks all it needs"
    return (
        "is the kubelet running? `systemctl status kubelet` on the node: the agent registers by "
        "itself as soon as it is back"
    )


def _of_tls(state: AgentState) -> Iterator[Note]:
    if state.tls is None:
        return
    expires_at, error = state.tls.expires_at, state.tls.error
    if error is not None:
        kept = "metrics are not served" if expires_at is None else "the last good one is kept"
        text = f"the certificate of metrics.tls is refused, {kept}: {error}"
        remedy = "correct the Secret, or what renews it: the files are read again by themselves"
        yield Note(subject="config", text=text, remedy=remedy, runbook="npucertificateinvalid")
    if expires_at is not None and expires_at < state.now:
        text = "the certificate of metrics.tls has expired: renew it"
        yield Note(subject="config", text=text, runbook="npucertificateinvalid")


def notes(state: AgentState) -> Iterator[Note]:
    """What is out of the ordinary and no fault."""
    lately = rising(state)
    for gone in state.timeline.gone:
        if state.monotonic - gone.since >= _MISSED:
            text = f"{gone.state.card.name} is gone"
            yield Note(subject="card", text=text, runbook="npucardmissing")
    for card in state.snapshot.cards:
        name = card.card.name
        if card.health.state is HealthState.UNKNOWN:
            text = f"{name}: its health is unknown: {card.health.reason}"
            yield Note(subject="card", card=card.id, text=text)
        if card.id not in lately and (counted := _counted(card)):
            text = f"{name} has counted errors, none of them lately: {counted}"
            yield Note(subject="card", card=card.id, text=text, runbook="npuerrorsrising")
        if state.is_disabled(card):
            text = f"{name} is not offered: disabled in the config"
            yield Note(subject="card", card=card.id, text=text)
    for resource in state.resources:
        for device in state.withheld(resource):
            yield Note(subject="resource", text=f"{device.name} is withheld: {device.reason}")
    for driver in state.dra:
        if driver.slices.dropped:
            fields = ", ".join(driver.slices.dropped)
            text = f"the API server drops {fields} of our ResourceSlices: a feature is off there"
            if driver.slices.uncounted:
                text += "; dra.partitions has no effect, and cards are offered whole"
            yield Note(subject="dra", text=text)
        if driver.session.phase is SessionPhase.STANDBY:
            yield Note(subject="dra", text=_standby(driver.session, "DRA driver "))
    if moving := state.moving:
        yield Note(subject="dra", text=_moving(moving, state))
    if state.config.waiting:
        keys = ", ".join(state.config.waiting)
        yield Note(
            subject="config",
            text=f"waits for a restart of the agent: {keys}",
            runbook="npuconfigwaitsforrestart",
        )
    labels = state.labels
    if labels is not None and not labels.in_place and labels.error is None and labels.labels:
        yield Note(subject="labels", text="the Node's labels are not applied yet")
    for one in state.resources:
        if one.session.phase is SessionPhase.STANDBY:
            yield Note(subject="resource", text=_standby(one.session))


def _moving(moving: Mapping[str, WantedApi], state: AgentState) -> str:
    """``npu0, npu3 move to DRA when their Pods have ended``."""
    to = [
        f"{', '.join(cards)} to {title}"
        for wish, title in ((WantedApi.DRA, "DRA"), (WantedApi.PLUGIN, "the device plugin"))
        if (
            cards := [
                card.card.name for card in state.snapshot.cards if moving.get(card.id) is wish
            ]
        )
    ]
    return f"on the way, each when its Pods have ended: {'; '.join(to)}"


def _standby(session: SessionStatus, what: str = "") -> str:
    why = f": {session.reason}" if session.reason else ""
    return f"{what}{session.resource} is on standby{why}"
