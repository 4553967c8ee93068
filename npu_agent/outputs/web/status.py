"""/status.json: the state of the agent for programs. Pure."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from npu_agent.core.hardware import CardState, CoreReading, Reading
from npu_agent.core.ledger import Assignment, PreparedClaim, PreparedDevice, card_of, part_of
from npu_agent.core.problems import Note, notes, problems, unready
from npu_agent.core.state import AgentState, DraState, ResourceState


def as_json(state: AgentState) -> dict[str, Any]:
    """The state as plain values. The keys are a contract; new ones may be added.

    Times are ISO 8601 in UTC; null where something is not known or does not apply.

    ``node, version, started_at, now``; ``ready`` and ``unready`` (as /readyz);
    ``problems``, ``notes``: lists of ``subject`` (card, resource, dra, assignments, config, labels,
    hardware), ``card`` (an ``id``), ``text``, ``remedy``, ``runbook`` (a section of /runbook; both
    may be empty);
    ``cards``: ``id, name, family, product, uuid, serial, pci_bus_id, numa_node, driver_version,
    firmware_version, core_count, disabled, moving_to`` (``dra`` or ``device-plugin``, for a card on
    its way there from the other one; else null), ``health {state, reason, cause, since}, holders``,
    and ``reading``, null or ``at, late`` (stale), ``alive, uptime`` (s), ``temperature`` (°C, the
    hottest sensor), ``power`` (W, the total), ``errors`` (counts by name), ``sensors`` (``kind,
    label, value, unit``), ``cores`` (``core, utilization`` (%), ``frequency`` (MHz), ``dram_total,
    dram_used`` (bytes));
    ``gone``: cards that left within a day, ``id, name, family, product, since``; ``timeline``: what
    happened within a day, the latest first, ``at, first, count, subject, tone`` (good, bad, warn,
    plain), ``card`` (an ``id``), ``text``;
    ``not_served``: ``entry, reason``; ``assignments``: ``holders`` of cards that are gone in
    ``missing``, and ``error``; a holder is ``namespace, pod, container, resource, device,
    claim`` (null by the device plugin), ``cores`` (``0-3``, null for all);
    ``resources``: ``resource, phase, reason, registrations, offered, healthy, withheld``
    (``device, reason``); ``dra``: ``driver, phase, reason, registrations, offered, untainted``,
    ``slices {published, generation, slices, devices, incomplete, writes, dropped, trouble}``, and
    ``claims``, those that are prepared: ``namespace, name, uid, pods, devices`` (``request, device,
    card`` (an ``id``), ``cores`` (as above), ``admin``);
    ``config``: ``generation, loaded_at, error, rejected, waiting``;
    ``labels``: null or ``output, labels, in_place, error, applied_at``.
    """
    labels, reasons = state.labels, unready(state)
    return {
        "node": state.node,
        "version": state.version,
        "started_at": iso(state.wall(state.started_at)),
        "now": iso(state.now),
        "ready": not reasons,
        "unready": list(reasons),
        "problems": [_note(note) for note in problems(state)],
        "notes": [_note(note) for note in notes(state)],
        "cards": [_card(card, state) for card in state.snapshot.cards],
        "gone": [
            {
                "id": gone.state.id,
                "name": gone.state.card.name,
                "family": gone.state.card.family,
                "product": gone.state.card.product,
                "since": iso(state.wall(gone.since)),
            }
            for gone in state.timeline.gone
        ],
        "timeline": [
            {**asdict(one), "at": iso(state.wall(one.at)), "first": iso(state.wall(one.first))}
            for one in state.timeline.entries(state.monotonic)
        ],
        "not_served": [
            {"entry": odd.entry, "reason": odd.reason} for odd in state.snapshot.skipped
        ],
        "assignments": {
            "missing": [_holder(gone, cores=None) for gone in state.gone],
            "error": state.assignments_error,
        },
        "resources": [_resource(one, state) for one in state.resources],
        "dra": [_driver(one, state) for one in state.dra],
        "config": {**asdict(state.config), "loaded_at": iso(state.wall(state.config.loaded_at))},
        "labels": labels
        and {
            "output": labels.output,
            "labels": dict(labels.labels),
            "in_place": labels.in_place,
            "error": labels.error,
            "applied_at": labels.applied_at and iso(state.wall(labels.applied_at)),
        },
    }


def _note(note: Note) -> dict[str, Any]:
    found = asdict(note)
    del found["unready"]  # it is in the list of that name
    return found


def iso(at: float) -> str:
    """A time of the wall clock as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _resource(one: ResourceState, state: AgentState) -> dict[str, Any]:
    return {
        "resource": one.session.resource,
        "phase": one.session.phase.value,
        "reason": one.session.reason or None,
        "registrations": one.session.registrations,
        "offered": len(one.devices),
        "healthy": sum(device.healthy for device in one.devices),
        "withheld": [
            {"device": device.name, "reason": device.reason} for device in state.withheld(one)
        ],
    }


def _driver(one: DraState, state: AgentState) -> dict[str, Any]:
    trouble = one.slices.trouble
    return {
        "driver": one.name,
        "phase": one.session.phase.value,
        "reason": one.session.reason or None,
        "registrations": one.session.registrations,
        "offered": len(one.devices),
        "untainted": sum(not device.taints for device in one.devices),
        "slices": {**asdict(one.slices), "trouble": trouble and str(trouble)},
        "claims": [_claim(claim, state) for claim in one.claims],
    }


def _claim(claim: PreparedClaim, state: AgentState) -> dict[str, Any]:
    return {
        "namespace": claim.namespace,
        "name": claim.name,
        "uid": claim.uid,
        "pods": list(claim.pods),
        "devices": [
            {
                "request": device.request,
                "device": device.device,
                "card": card_of(device.footprint, state.snapshot.cards),
                "cores": _cores(device, state),
                "admin": device.admin,
            }
            for device in claim.devices
        ],
    }


def _cores(device: PreparedDevice, state: AgentState) -> str | None:
    """The cores of a part of a card; None where it is all of it, or gone."""
    part = part_of(device.footprint, state.snapshot.cards)
    return None if part is None else str(part)


def _holder(one: Assignment, *, cores: str | None) -> dict[str, Any]:
    known = {"container": one.container or None, "claim": one.claim or None}
    return {**asdict(one), **known, "cores": cores}


def _card(state: CardState, agent: AgentState) -> dict[str, Any]:
    card, health, reading = state.card, state.health, state.reading
    return {
        "id": state.id,
        "name": card.name,
        "family": card.family,
        "product": card.product,
        "uuid": card.uuid,
        "serial": card.serial,
        "pci_bus_id": card.pci_bus_id,
        "numa_node": card.numa_node,
        "driver_version": card.driver_version,
        "firmware_version": card.firmware_version,
        "core_count": card.core_count,
        "disabled": agent.is_disabled(state),
        "moving_to": (to := agent.moving.get(state.id)) and to.value,
        "health": {
            "state": health.state.value,
            "reason": health.reason,
            "cause": health.cause and health.cause.value,
            "since": iso(agent.wall(health.since)),
        },
        "reading": reading
        and {
            "at": iso(agent.wall(reading.at)),
            "late": agent.is_stale(state),
            **_reading(reading),
        },
        "holders": [
            _holder(
                holding.assignment,
                cores=None if holding.cores == card.all_cores else str(holding.cores),
            )
            for holding in agent.usages_of(state)
        ],
    }


def _reading(reading: Reading) -> dict[str, Any]:
    return {
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
        "cores": [_core(core) for core in reading.cores],
    }


def _core(core: CoreReading) -> dict[str, Any]:
    return {
        "core": core.core,
        "utilization": core.utilization and round(core.utilization, 2),
        "frequency": core.frequency,
        "dram_total": core.dram_total,
        "dram_used": core.dram_used,
    }
