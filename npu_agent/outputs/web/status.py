"""/status.json: the state of the agent for programs. Pure."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from npu_agent.core.hardware import CardState, CoreRange
from npu_agent.core.kinds import Problem
from npu_agent.core.ledger import Assignment, card_of
from npu_agent.core.problems import notes, problems, unready
from npu_agent.core.state import AgentState, DraState, SessionStatus
from npu_agent.wording import ENGLISH, of_problem


def as_json(state: AgentState) -> dict[str, Any]:
    """The state as plain values, whose keys docs/cli.md explains: they stay, and may get more."""
    reasons = tuple(map(ENGLISH.unready, unready(state)))
    labels = state.labels

    return {
        **_pick(state, "node", "version"),
        "started_at": iso(state.wall(state.started_at)),
        "now": iso(state.now),
        "ready": not reasons,
        "unready": reasons,
        "problems": [_problem(problem, state) for problem in problems(state)],
        "notes": [_problem(problem, state) for problem in notes(state)],
        "cards": [_card(card, state) for card in state.snapshot.cards],
        "gone": [
            {
                "id": gone.state.id,
                **_pick(gone.state.card, "name", "family", "product"),
                "since": iso(state.wall(gone.since)),
            }
            for gone in state.missing
        ],
        "timeline": [
            {
                "kind": entry.kind,
                **_pick(entry, "subject", "tone"),
                "text": ENGLISH.text(entry),
                "card": entry.card and entry.card.id,
                "at": iso(state.wall(entry.at)),
                "first": iso(state.wall(entry.first)),
                "count": entry.count,
            }
            for entry in state.timeline.entries(state.monotonic)
        ],
        "first_ids": dict(state.first_ids),
        "expected_cards": state.expected_cards,
        "not_served": [_pick(skipped, "entry", "reason") for skipped in state.snapshot.skipped],
        "assignments": {
            "missing": [_holder(device.assignment, cores=None) for device in state.gone],
            "error": state.assignments_error,
        },
        "resources": [
            {
                "resource": resource.session.resource,
                **_session(resource.session),
                "offered": len(resource.devices),
                "healthy": sum(device.healthy for device in resource.devices),
                "withheld": [
                    {"device": device.name, "reason": device.reason}
                    for device in state.withheld(resource)
                ],
            }
            for resource in state.resources
        ],
        "dra": [_driver(driver, state) for driver in state.dra],
        "config": {
            **asdict(state.config),
            "error": state.config.error,
            "loaded_at": iso(state.wall(state.config.loaded_at)),
        },
        "labels": labels
        and {
            "output": labels.output,
            "labels": dict(labels.labels),
            **_pick(labels, "in_place", "error"),
            "applied_at": labels.applied_at and iso(state.wall(labels.applied_at)),
        },
        "condition": state.condition and asdict(state.condition),
        "reads": state.reads and asdict(state.reads),
    }


def iso(at: float) -> str:
    """A time of the wall clock as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _pick(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _problem(problem: Problem, state: AgentState) -> dict[str, Any]:
    words = of_problem(problem, state)
    here = {card.id for card in state.snapshot.cards}
    cards = [card.id for card in problem.cards if card.id in here]
    return {
        "kind": problem.kind,
        "cause": problem.cause and problem.cause.value,
        **_pick(problem, "subject", "severity", "runbook", "pods"),
        **asdict(words),
        "cards": cards,
        "card": cards[0] if cards else None,
        "since": None if problem.since is None else iso(state.wall(problem.since)),
    }


def _session(session: SessionStatus) -> dict[str, Any]:
    return {
        "phase": session.phase.value,
        "reason": session.reason or None,
        "registrations": session.registrations,
    }


def _driver(driver: DraState, state: AgentState) -> dict[str, Any]:
    cards = state.snapshot.cards
    return {
        "driver": driver.name,
        **_session(driver.session),
        "offered": len(driver.devices),
        "untainted": sum(not device.barred for device in driver.devices),
        "slices": asdict(driver.slices),
        "claims": [
            {
                **_pick(claim, "namespace", "name", "uid", "pods"),
                "devices": [
                    {
                        **_pick(device, "request", "device"),
                        "card": card and card.id,
                        "cores": _part(device.footprint.cores, card) if card else None,
                        "admin": device.admin,
                    }
                    for device in claim.devices
                    for card in [card_of(device.footprint, cards)]
                ],
            }
            for claim in driver.claims
        ],
    }


def _part(cores: CoreRange, card: CardState) -> str | None:
    """The cores; None if they are all of the card's."""
    return None if cores == card.card.all_cores else str(cores)


def _holder(assignment: Assignment, *, cores: str | None) -> dict[str, Any]:
    named = {"container": assignment.container or None, "claim": assignment.claim or None}
    return {**asdict(assignment), **named, "cores": cores}


def _card(state: CardState, agent: AgentState) -> dict[str, Any]:
    card = state.card
    health = state.health
    reading = state.reading

    return {
        "id": state.id,
        **card.as_json(),
        "core_count": card.core_count,
        "disabled": agent.is_disabled(state),
        "cordoned": agent.cordons.get(state.id),
        "held_by": agent.held_by.get(state.id),
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
            **_pick(reading, "alive", "uptime"),
            "temperature": reading.temperature(),
            "power": reading.power(),
            "errors": dict(reading.errors),
            "error_text": reading.error_text,
            "throttle": reading.throttle and list(reading.throttle),
            "throttled": dict(reading.throttled),
            "limits": asdict(reading.limits),
            "sensors": [
                {
                    "kind": sensor.kind.name.lower(),
                    **_pick(sensor, "label", "value"),
                    "unit": sensor.kind.value,
                }
                for sensor in reading.sensors
            ],
            "cores": [
                {
                    "core": core.core,
                    "utilization": core.utilization and round(core.utilization, 2),
                    **_pick(core, "frequency", "dram_total", "dram_used"),
                }
                for core in reading.cores
            ],
        },
        "holders": [
            _holder(holding.assignment, cores=_part(holding.cores, state))
            for holding in agent.usages_of(state)
        ],
    }
