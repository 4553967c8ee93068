"""All that the status page and /status.json show, computed from what the agent knows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from npu_agent.config.poller import State
from npu_agent.config.schema import disabled_for
from npu_agent.core import hardware as model
from npu_agent.core.hardware import CardState, CoreRange, CoreReading, Oddity, Snapshot
from npu_agent.core.ledger import Assignment
from npu_agent.core.offer import Device, split_id
from npu_agent.kubelet.podresources import Holdings
from npu_agent.outputs.deviceplugin import session
from npu_agent.outputs.labels.state import LabelState

_LATE = 3
"""Intervals between readings (metrics.interval) after which the last one is called old."""
_LATE_AT_LEAST = 10.0
"""Seconds."""

Subject = Literal["card", "resource", "assignments", "config", "labels", "hardware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that people should know, and what of."""

    subject: Subject
    text: str
    card: str | None = None
    """The ID of the card that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A container, and what it holds of a card."""

    namespace: str
    pod: str
    container: str
    resource: str
    device: str
    """The device's ID."""
    cores: CoreRange | None
    """None: all of the card's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardStatus:
    """A card, how it is, and who holds it."""

    state: CardState
    title: str
    """For people: ``Acme Anvil``."""
    core_count: int
    disabled: bool
    """Whether the config keeps it from being offered."""
    read_at: float | None
    """When its reading was taken; seconds of the wall clock. None: there is none."""
    late: bool
    """Whether the reading is too old to be taken for how things are now."""
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStatus:
    """A resource, how it stands at the kubelet, and what is offered of it."""

    session: session.Status
    offered: int
    """Devices that the kubelet is told of, healthy or not."""
    healthy: int
    withheld: tuple[tuple[str, str], ...]
    """(device, reason) of those that are unhealthy although their card is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How the agent and its node stand at one moment. Times are seconds of the wall clock."""

    node: str | None
    version: str
    started_at: float
    now: float
    looked: bool
    """False until every card that was found at the start has been read."""
    unready: tuple[str, ...]
    """As /readyz says."""
    cards: tuple[CardStatus, ...]
    odd: tuple[Oddity, ...]
    missing: tuple[Holder, ...]
    """Containers that hold a device of a card that is not there any more."""
    holdings_error: str | None
    resources: tuple[ResourceStatus, ...]
    config: State
    labels: LabelState | None
    """None: nobody looks after labels."""
    problems: tuple[Note, ...]
    """What somebody should see to; empty when all is well."""
    notes: tuple[Note, ...]
    """What is out of the ordinary and no fault."""


def status(
    *,
    snapshot: Snapshot,
    holdings: Holdings,
    config: State,
    sessions: Sequence[session.Status],
    devices: Mapping[str, Sequence[Device]],
    labels: LabelState | None,
    unready: tuple[str, ...],
    node: str | None,
    version: str,
    started_at: float,
    now: float,
    monotonic: float,
) -> Status:
    """How things stand.

    Args:
        snapshot: the hardware.
        holdings: who holds what, of any resource of the node.
        config: the config as it stands.
        sessions: how each resource stands at the kubelet.
        devices: what is offered of each resource.
        labels: how the labels stand; None if nobody looks after them.
        unready: what `npu_agent.outputs.web.ready.reasons` says.
        node: this Node's name, if known.
        version: the agent's.
        started_at: when the agent started, `time.time`.
        now: `time.time`.
        monotonic: `time.monotonic` at the same moment: readings carry that clock.
    """
    ours = {one.resource for one in sessions}
    known = {state.id for state in snapshot.cards}
    held: dict[str, list[Holder]] = {}
    missing: list[Holder] = []
    for assignment in holdings.assignments:
        card_id, cores = split_id(assignment.device)
        if card_id in known:
            held.setdefault(card_id, []).append(_holder(assignment, cores))
        elif assignment.resource in ours:
            missing.append(_holder(assignment, cores))
    disabled = {name.lower() for name in disabled_for(config.config, node)}
    late_after = max(_LATE_AT_LEAST, _LATE * config.config.metrics.interval)
    cards = tuple(
        _card(state, held.get(state.id, ()), disabled, monotonic, now, late_after)
        for state in snapshot.cards
    )
    resources = tuple(_resource(one, devices.get(one.resource, ()), cards) for one in sessions)
    return Status(
        node=node,
        version=version,
        started_at=started_at,
        now=now,
        looked=snapshot.complete,
        unready=unready,
        cards=cards,
        odd=snapshot.odd,
        missing=tuple(missing),
        holdings_error=holdings.error,
        resources=resources,
        config=config,
        labels=labels,
        problems=(
            *_problems_of_cards(cards, missing),
            *_problems_of_the_agent(unready, config, holdings, labels),
            *(_odd(odd) for odd in snapshot.odd if odd.unread),
        ),
        notes=(*_notes(cards, resources, config, labels), *_standing_by(sessions)),
    )


def as_json(status: Status) -> dict[str, Any]:
    """The status for programs. The keys are a contract; new ones may be added.

    Times are ISO 8601 in UTC; null where something is not known or does not apply.

    ``node, version, started_at, now``; ``ready`` and ``unready`` (as /readyz);
    ``problems``, ``notes``: lists of ``subject`` (card, resource, assignments, config, labels,
    hardware), ``card`` (an ``id``), ``text``;
    ``cards``: ``id, name, family, product, uuid, serial, pci_bus_id, numa_node, driver_version,
    firmware_version, core_count, disabled, health {state, reason, since}, holders``, and
    ``reading``, null or ``at, late, alive, uptime`` (s), ``temperature`` (°C, the hottest sensor),
    ``power`` (W, the total), ``errors`` (counts by name), ``sensors`` (``kind, label, value,
    unit``), ``cores`` (``core, utilization`` (%), ``frequency`` (MHz), ``dram_total, dram_used``
    (bytes));
    ``not_served``: ``entry, reason``; ``assignments``: ``holders`` of cards that are gone in
    ``missing``, and ``error``; a holder is ``namespace, pod, container, resource, device, cores``
    (``0-3``, null for all);
    ``resources``: ``resource, phase, reason, registrations, offered, healthy, withheld``
    (``device, reason``); ``config``: ``generation, loaded_at, error, rejected, waiting``;
    ``labels``: null or ``output, labels, in_place, error, applied_at``.
    """
    config, labels = status.config, status.labels
    return {
        "node": status.node,
        "version": status.version,
        "started_at": iso(status.started_at),
        "now": iso(status.now),
        "ready": not status.unready,
        "unready": list(status.unready),
        "problems": [_note_json(note) for note in status.problems],
        "notes": [_note_json(note) for note in status.notes],
        "cards": [_card_json(card) for card in status.cards],
        "not_served": [{"entry": odd.entry, "reason": odd.reason} for odd in status.odd],
        "assignments": {
            "missing": [_holder_json(holder) for holder in status.missing],
            "error": status.holdings_error,
        },
        "resources": [
            {
                "resource": one.session.resource,
                "phase": one.session.phase.value,
                "reason": one.session.reason or None,
                "registrations": one.session.registrations,
                "offered": one.offered,
                "healthy": one.healthy,
                "withheld": [{"device": name, "reason": why} for name, why in one.withheld],
            }
            for one in status.resources
        ],
        "config": {
            "generation": config.generation,
            "loaded_at": iso(config.loaded_at),
            "error": config.error,
            "rejected": config.rejected,
            "waiting": list(config.waiting),
        },
        "labels": None
        if labels is None
        else {
            "output": labels.output,
            "labels": dict(labels.labels),
            "in_place": labels.in_place,
            "error": labels.error,
            "applied_at": None if labels.applied_at is None else iso(labels.applied_at),
        },
    }


def iso(at: float) -> str:
    """A time of the wall clock as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _holder(assignment: Assignment, cores: CoreRange | None) -> Holder:
    return Holder(
        namespace=assignment.namespace,
        pod=assignment.pod,
        container=assignment.container,
        resource=assignment.resource,
        device=assignment.device,
        cores=cores,
    )


def _card(
    state: CardState,
    holders: Iterable[Holder],
    disabled: set[str],
    monotonic: float,
    now: float,
    late_after: float,
) -> CardStatus:
    card, reading = state.card, state.reading
    names = {name.lower() for name in (card.name, card.uuid, card.pci_bus_id, state.id) if name}
    age = None if reading is None else max(0.0, monotonic - reading.at)
    return CardStatus(
        state=state,
        title=card.title,
        core_count=card.core_count,
        disabled=bool(names & disabled),
        read_at=None if age is None else now - age,
        late=age is not None and age > late_after,
        holders=tuple(sorted(holders, key=lambda holder: holder.cores or CoreRange(0, 0))),
    )


def _resource(
    one: session.Status, devices: Sequence[Device], cards: Sequence[CardStatus]
) -> ResourceStatus:
    fenced = {card.state.id for card in cards if _unhealthy(card)}
    return ResourceStatus(
        session=one,
        offered=len(devices),
        healthy=sum(device.healthy for device in devices),
        withheld=tuple(
            (device.name, device.reason)
            for device in devices
            if not device.healthy and device.card_id not in fenced
        ),
    )


def _unhealthy(card: CardStatus) -> bool:
    return card.state.health.state is model.State.UNHEALTHY


def _problems_of_cards(cards: Sequence[CardStatus], missing: Sequence[Holder]) -> Iterable[Note]:
    for card in cards:
        name, id_ = card.state.card.name, card.state.id
        if _unhealthy(card):
            users = dict.fromkeys(f"{holder.namespace}/{holder.pod}" for holder in card.holders)
            used = f"; in use by {', '.join(users)}" if users else ""
            text = f"{name} is unhealthy: {card.state.health.reason}{used}"
            yield Note(subject="card", card=id_, text=text)
    late = [card for card in cards if card.late and not _unhealthy(card)]
    if late:
        names = ", ".join(card.state.card.name for card in late)
        text = f"{names}: the figures are old, and no new ones come"
        yield Note(subject="card", card=late[0].state.id, text=text)
    for holder in missing:
        pod = f"{holder.namespace}/{holder.pod}"
        text = f"{pod} holds {holder.device}, whose card is not there any more"
        yield Note(subject="assignments", text=text)


def _problems_of_the_agent(
    unready: Sequence[str], config: State, holdings: Holdings, labels: LabelState | None
) -> Iterable[Note]:
    told = None if config.error is None else f"config: {config.error}"
    for reason in unready:
        if reason != told:
            yield Note(subject="resource", text=reason)
    if config.error is not None:
        first = config.error.partition("\n")[0]
        text = f"the config file is refused, the last good one stays in force: {first}"
        yield Note(subject="config", text=text)
    if holdings.error is not None:
        yield Note(subject="assignments", text=f"who holds what is not known: {holdings.error}")
    if labels is not None and labels.error is not None:
        yield Note(subject="labels", text=f"the labels are not in place: {labels.error}")


def _notes(
    cards: Sequence[CardStatus],
    resources: Sequence[ResourceStatus],
    config: State,
    labels: LabelState | None,
) -> Iterable[Note]:
    for card in cards:
        if card.state.health.state is model.State.UNKNOWN:
            text = f"{card.state.card.name}: its health is unknown: {card.state.health.reason}"
            yield Note(subject="card", card=card.state.id, text=text)
        if card.disabled:
            text = f"{card.state.card.name} is not offered: disabled in the config"
            yield Note(subject="card", card=card.state.id, text=text)
    for resource in resources:
        for name, reason in resource.withheld:
            yield Note(subject="resource", text=f"{name} is held back: {reason}")
    if config.waiting:
        keys = ", ".join(config.waiting)
        yield Note(subject="config", text=f"waits for a restart of the agent: {keys}")
    if labels is not None and not labels.in_place and labels.error is None and labels.labels:
        yield Note(subject="labels", text="the labels are not in place yet")


def _standing_by(sessions: Sequence[session.Status]) -> Iterable[Note]:
    for one in sessions:
        if one.phase is session.Phase.STANDBY:
            why = f": {one.reason}" if one.reason else ""
            yield Note(subject="resource", text=f"{one.resource} stands by{why}")


def _odd(odd: Oddity) -> Note:
    return Note(subject="hardware", text=f"{odd.entry} cannot be read: {odd.reason}")


def _note_json(note: Note) -> dict[str, Any]:
    return {"subject": note.subject, "card": note.card, "text": note.text}


def _card_json(card: CardStatus) -> dict[str, Any]:
    state, reading = card.state, card.state.reading
    return {
        "id": state.id,
        "name": state.card.name,
        "family": state.card.family,
        "product": state.card.product,
        "uuid": state.card.uuid,
        "serial": state.card.serial,
        "pci_bus_id": state.card.pci_bus_id,
        "numa_node": state.card.numa_node,
        "driver_version": state.card.driver_version,
        "firmware_version": state.card.firmware_version,
        "core_count": card.core_count,
        "disabled": card.disabled,
        "health": {
            "state": state.health.state.value,
            "reason": state.health.reason,
            "since": iso(state.health.since),
        },
        "reading": None
        if reading is None or card.read_at is None
        else {
            "at": iso(card.read_at),
            "late": card.late,
            "alive": reading.alive,
            "uptime": reading.uptime,
            "temperature": reading.temperature(),
            "power": reading.power(),
            "errors": dict(reading.errors),
            "sensors": [
                {
                    "kind": sensor.kind.name.lower(),
                    "label": sensor.label,
                    "value": sensor.value,
                    "unit": sensor.kind.value,
                }
                for sensor in reading.sensors
            ],
            "cores": [_core_json(core) for core in reading.cores],
        },
        "holders": [_holder_json(holder) for holder in card.holders],
    }


def _core_json(core: CoreReading) -> dict[str, Any]:
    return {
        "core": core.core,
        "utilization": None if core.utilization is None else round(core.utilization, 2),
        "frequency": core.frequency,
        "dram_total": core.dram_total,
        "dram_used": core.dram_used,
    }


def _holder_json(holder: Holder) -> dict[str, Any]:
    return {
        "namespace": holder.namespace,
        "pod": holder.pod,
        "container": holder.container,
        "resource": holder.resource,
        "device": holder.device,
        "cores": None if holder.cores is None else str(holder.cores),
    }
