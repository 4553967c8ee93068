"""What is wrong with the node and the agent, and what to do: the one answer to "is all well?".

`problems` wait for a person; `unready` are those of them that keep the agent from being ready;
`notes` are out of the ordinary and no fault. Page, status.json, /readyz and doctor show them.
"""

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

Subject = Literal[
    "card", "resource", "dra", "assignments", "config", "labels", "node", "hardware", "cdi"
]

HOT, VERY_HOT = 90.0, 100.0
"""°C above which a card is hot, and so hot that the load has to go now: as the alerts have it."""
_RISING = 900.0
"""Seconds for which a counted error is a problem, as the alert has it; later it is a note."""
_MISSED = 6 * 3600.0
"""The same for a card that left."""


@dataclass(frozen=True, slots=True)
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
    unready: str = ""
    """What /readyz says; empty: the agent is ready in spite of it."""


def problems(state: AgentState) -> tuple[Note, ...]:
    """What a person should see to; empty when all is well."""
    return (*_of_cards(state), *_of_the_agent(state))


def unready(state: AgentState) -> tuple[str, ...]:
    """What keeps the agent from being ready; empty when nothing does.

    It is ready when the kubelet holds every resource that has cards open, or when another instance
    of the agent serves it (a rolling update with maxSurge waits for the new one to be ready before
    it ends the old one), and when the config file that is there is the one in force. Keys that
    wait for a restart are no reason: only a restart would help, and that is the user's decision.
    """
    return tuple(note.unready for note in _of_the_agent(state) if note.unready)


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
        yield Note(
            "card",
            f"{cards}: readings are stale, no new ones arrive",
            card=stale[0].id,
            remedy="temperature, load and errors of it are unknown: see `dmesg` on the node; a "
            "read that hangs in the kernel needs the driver reloaded, or a reboot",
            runbook="npureadingsstale",
        )
    lately = rising(state)
    for card in state.snapshot.cards:
        if card.id in lately:
            yield Note(
                "card",
                f"{card.card.name} counted new errors: {_counted(card)}",
                card=card.id,
                remedy="ask whether the Pods that hold it are well; once is no reason to act",
                runbook="npuerrorsrising",
            )
    for left in state.timeline.gone:
        if state.monotonic - left.since < _MISSED:
            yield Note(
                "card",
                f"{left.state.card.name} is gone: it was here while this agent ran",
                remedy="unless somebody removed it on purpose, `lspci` on the node shows whether "
                "the bus still has it, and `dmesg` why it left",
                runbook="npucardmissing",
            )
    for gone in state.gone:
        text = f"{_pod(gone)} holds {state.name_of_gone(gone)}, whose card is gone"
        remedy = "delete that Pod if it hangs: what it held is not there any more"
        yield Note("assignments", text, remedy=remedy, runbook="npucardmissing")


def _unhealthy(card: CardState, state: AgentState) -> Note:
    users = dict.fromkeys(_pod(usage.assignment) for usage in state.usages_of(card))
    used = f"; in use by {', '.join(users)}" if users else ""
    found = advice(card.health.cause)
    remedy = found.remedy
    if users:
        remedy = f"delete the Pods that hold it, so that they get another card; {remedy}"
    text = f"{card.card.name} is unhealthy: {plain_reason(card.health)}{used}"
    return Note("card", text, card=card.id, remedy=remedy, runbook=found.runbook)


def is_hot(card: CardState, state: AgentState) -> bool:
    """Whether the card's present temperature is a reason to act, fenced for it or not."""
    temperature = card.reading.temperature() if card.reading else None
    limit = HOT if state.max_temperature is None else min(HOT, state.max_temperature)
    return temperature is not None and temperature > limit and not state.is_stale(card)


def _hot(card: CardState) -> Note:
    temperature = (card.reading and card.reading.temperature()) or 0.0
    very = temperature > VERY_HOT
    return Note(
        "card",
        f"{card.card.name} is {'very ' if very else ''}hot: {temperature:.1f} °C",
        card=card.id,
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
        if why := _unserved(resource.session, state):
            remedy = _REMEDIES.get(resource.session.phase, _KUBELET)
            if not state.snapshot.complete and resource.session.phase in _WITHOUT_CARDS:
                remedy = ""
            yield Note(
                "resource", why, remedy=remedy, runbook="npuresourcenotregistered", unready=why
            )
    for driver in state.dra:
        yield from _of_driver(driver)
    if (error := state.config.error) is not None:
        first = error.partition("\n")[0]
        yield Note(
            "config",
            f"the config file is refused, the last good one stays in force: {first}",
            remedy="correct the file, and try it with `npu-agent config check FILE`: an agent that "
            "starts now would not come up",
            runbook="npuconfigrejected",
            unready=f"config: {error}",
        )
    yield from _of_tls(state)
    if state.assignments_error is not None:
        yield Note(
            "assignments",
            f"the assignments of devices to Pods are unknown: {state.assignments_error}",
            remedy="cards are served all the same; is the kubelet's directory pod-resources "
            "mounted into the agent's Pod? `npu-agent doctor` there checks it",
            runbook="log-lines",
        )
    for wrong in state.cordons_wrong:
        yield Note("node", wrong.what, remedy=wrong.remedy, runbook="log-lines")
    if state.node_error is not None:
        text = f"changes of the Node are not seen, cordons and labels: {state.node_error}"
        yield Note("node", text, runbook="log-lines")
    if state.labels is not None and state.labels.error is not None:
        text = f"the Node's labels are not applied: {state.labels.error}"
        yield Note("labels", text, runbook="npulabelsnotapplied")
    if state.cdi_error is not None:
        text = f"the CDI specs cannot be written: {state.cdi_error}"
        yield Note("cdi", text, runbook="log-lines", unready=text)
    for entry in state.snapshot.skipped:
        if entry.unread:
            text = f"{entry.entry} cannot be read: {entry.reason}"
            runbook = "a-node-offers-no-npus-or-too-few"
            yield Note("hardware", text, remedy=UNREADABLE, runbook=runbook)


_WITHOUT_CARDS = (SessionPhase.NO_CARDS, SessionPhase.REGISTERING)
_AGAIN = "the agent tries again by itself; `npu-agent doctor` in its Pod checks all it needs"
_REMEDIES = {SessionPhase.WAITING: _AGAIN, SessionPhase.BLOCKED: _AGAIN}
_KUBELET = (
    "is the kubelet running? `systemctl status kubelet` on the node: the agent registers by itself "
    "as soon as it is back"
)


def _unserved(session: SessionStatus, state: AgentState) -> str | None:
    """Why this resource is not served as it should be; None if it is."""
    doing = session.phase.value
    if session.phase in (SessionPhase.REGISTERED, SessionPhase.STANDBY):
        return None
    if session.phase in _WITHOUT_CARDS:
        doing = "registering again" if session.registrations else "registering"
        if not state.snapshot.complete:
            doing = "registering: still searching for cards"
        elif not _has_cards(session.resource, state):
            return None
    return _reasoned(f"{session.resource}: {doing}", session)


def _has_cards(name: str, state: AgentState) -> bool:
    """Computed from the hardware: a session gets its cards a moment after they were found."""
    return any(
        state.places.get(device.card_id, ApiMode.PLUGIN).listed
        for resource in state.wanted
        if resource.name == name
        for device in advertise(state.snapshot, resource, state.disabled)
    )


def _of_driver(driver: DraState) -> Iterator[Note]:
    """Why claims cannot be served as they should be."""
    session, slices, what = driver.session, driver.slices, f"DRA driver {driver.name}"
    if session.phase not in (SessionPhase.STANDBY, SessionPhase.REGISTERED):
        text = _reasoned(f"{what}: {session.phase.value}", session)
        remedy = _REMEDIES.get(session.phase, _KUBELET)
        yield Note("dra", text, remedy=remedy, runbook="npudranotregistered", unready=text)
    elif session.phase is SessionPhase.REGISTERED and not slices.published:
        text = str(slices.trouble or f"{what}: its cards are not published yet")
        yield Note("dra", text, runbook="npudraslicesnotpublished", unready=text)
    elif slices.incomplete:
        yield Note(
            "dra",
            f"{what}: its pool is incomplete: no card of it is used",
            remedy="the agent publishes what is missing by itself; `npu-agent doctor` names slices "
            "of other owners",
            runbook="npudrapoolincomplete",
        )


def _of_tls(state: AgentState) -> Iterator[Note]:
    if state.tls is None:
        return
    expires_at, error = state.tls.expires_at, state.tls.error
    closed = expires_at is None and f"metrics.tls: {error or 'the certificate is not read yet'}"
    if error is not None or closed:
        kept = "metrics are not served" if closed else "the last good one is kept"
        yield Note(
            "config",
            f"the certificate of metrics.tls is refused, {kept}: {error}" if error else str(closed),
            remedy="correct the Secret, or what renews it: the files are read again by themselves"
            if error
            else "",
            runbook="npucertificateinvalid",
            unready=closed or "",
        )
    if expires_at is not None and expires_at < state.now:
        text = "the certificate of metrics.tls has expired: renew it"
        yield Note("config", text, runbook="npucertificateinvalid")


def _reasoned(text: str, session: SessionStatus) -> str:
    return f"{text}: {session.reason}" if session.reason else text


def notes(state: AgentState) -> Iterator[Note]:
    """What is out of the ordinary and no fault."""
    lately = rising(state)
    for gone in state.timeline.gone:
        if state.monotonic - gone.since >= _MISSED:
            yield Note("card", f"{gone.state.card.name} is gone", runbook="npucardmissing")
    for card in state.snapshot.cards:
        name = card.card.name
        if card.health.state is HealthState.UNKNOWN:
            yield Note("card", f"{name}: its health is unknown: {card.health.reason}", card.id)
        if card.id not in lately and (counted := _counted(card)):
            text = f"{name} has counted errors, none of them lately: {counted}"
            yield Note("card", text, card.id, runbook="npuerrorsrising")
        if (reason := state.cordons.get(card.id)) is not None:
            remedy = f"`npu-agent uncordon {name}` brings it back"
            yield Note("card", f"{name} is cordoned: {reason}", card.id, remedy=remedy)
        if state.is_disabled(card):
            yield Note("card", f"{name} is not offered: disabled in the config", card.id)
    for resource in state.resources:
        for device in state.withheld(resource):
            yield Note("resource", f"{device.name} is withheld: {device.reason}")
    for driver in state.dra:
        if driver.slices.dropped:
            fields = ", ".join(driver.slices.dropped)
            text = f"the API server drops {fields} of our ResourceSlices: a feature is off there"
            if driver.slices.uncounted:
                text += "; dra.partitions has no effect, and cards are offered whole"
            yield Note("dra", text)
        if driver.session.phase is SessionPhase.STANDBY:
            text = f"DRA driver {driver.session.resource} is on standby"
            yield Note("dra", _reasoned(text, driver.session))
    if state.moving:
        yield Note("dra", _moving(state.moving, state))
    if state.config.waiting:
        text = f"waits for a restart of the agent: {', '.join(state.config.waiting)}"
        yield Note("config", text, runbook="npuconfigwaitsforrestart")
    labels = state.labels
    if labels is not None and not labels.in_place and labels.error is None and labels.labels:
        yield Note("labels", "the Node's labels are not applied yet")
    for one in state.resources:
        if one.session.phase is SessionPhase.STANDBY:
            text = f"{one.session.resource} is on standby"
            yield Note("resource", _reasoned(text, one.session))


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
