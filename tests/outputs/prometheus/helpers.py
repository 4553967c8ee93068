"""Cards, holders and pages made in code, and pages taken apart by prometheus_client's parsers."""

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from npu_agent.core.counts import Counts
from npu_agent.core.hardware import (
    CardState,
    Cause,
    CoreReading,
    Health,
    HealthState,
    Reading,
    Sensor,
    SensorKind,
    Snapshot,
)
from npu_agent.core.ledger import Assignment, PreparedClaim
from npu_agent.core.state import AgentState, ConfigState, ResourceState, SessionPhase, SessionStatus
from npu_agent.core.vendor import MetricSchema
from npu_agent.outputs.prometheus import cards
from npu_agent.outputs.prometheus import own as own_metrics
from npu_agent.outputs.prometheus.own import LoopLag
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from tests.outputs.helpers import RESOURCE, holdings

SENSORS = (
    Sensor(SensorKind.TEMPERATURE, "peak", 45_500),
    Sensor(SensorKind.TEMPERATURE, "ambient", 30_000),
    Sensor(SensorKind.POWER, "rms_total", 53_250_000),
    Sensor(SensorKind.VOLTAGE, "vdd", 750),
    Sensor(SensorKind.CURRENT, "idd", 1_200),
)


def card(
    family: str = "rngd",
    index: int = 0,
    *,
    state: HealthState = HealthState.HEALTHY,
    reason: str = "works",
    cause: Cause | None = None,
    reading: Reading | None = None,
    **values: Any,
) -> CardState:
    """A card that tells no more than its number, and `values` of `Card`."""
    id_ = values.get("uuid") or f"{family}-{index}"
    return CardState(
        id=id_,
        card=FAMILIES[family].card(index, product=family, **values),
        health=Health(state=state, reason=reason, since=0.0, cause=cause),
        reading=reading,
    )


def reading(at: float | None = None, **values: Any) -> Reading:
    return Reading(at=time.monotonic() if at is None else at, **values)


def full_reading(cores: int = 2) -> Reading:
    """A reading in which the driver says all that it can."""
    return reading(
        alive=True,
        uptime=3600,
        errors=(("axi_post_error", 3), ("device_error", 0)),
        sensors=SENSORS,
        cores=tuple(
            CoreReading(
                core=core,
                utilization=12.5 * core,
                frequency=1000,
                cycles=10**12 + core,
                task_cycles=10**11 + core,
                dram_total=6 << 30,
                dram_used=core << 20,
            )
            for core in range(cores)
        ),
    )


def snapshot(*cards: CardState) -> Snapshot:
    return Snapshot(cards=cards, complete=True)


def held(device: str, pod: str = "train-0", resource: str = RESOURCE) -> Assignment:
    return Assignment("ml", pod, "main", resource, device)


def own(*sessions: tuple[SessionStatus, Counts], **values: Any) -> AgentState:
    """The state of a new agent, but for `values`; with these sessions, or a registered one."""
    registered = SessionStatus(resource=RESOURCE, phase=SessionPhase.REGISTERED, registrations=1)
    resources = (
        ResourceState(session=session, counts=counts)
        for session, counts in sessions or ((registered, Counts()),)
    )
    defaults: dict[str, Any] = {
        "version": "1.2.3",
        "node": "node-1",
        "hostname": "node-1",
        "started_at": 0.0,
        "now": 1_700_000_000.0,
        "monotonic": 0.0,
        "snapshot": Snapshot(complete=True),
        "resources": tuple(resources),
        "config": ConfigState(loaded_at=0.0),
        "stale_after": 15.0,
        "lag": LoopLag().seconds,
    }
    return AgentState(**{**defaults, **values})


def page_of_cards(
    found: Snapshot,
    *assignments: Assignment,
    claims: Iterable[PreparedClaim] = (),
    uses: Iterable[Assignment] = (),
    schema: MetricSchema = SCHEMAS["0.8"],
    hostname: str = "node-1",
    pod_labels: bool = True,
    openmetrics: bool = False,
) -> bytes:
    """The cards' part of the page, with who holds what as the ledger finds it."""
    held_now = holdings(found, *assignments, claims=claims, uses=uses)
    state = own(snapshot=found, usages=held_now, hostname=hostname)
    shown = cards.series(state, pod_labels=pod_labels)
    families = cards.families(schema, shown)
    return b"".join(family.render(openmetrics=openmetrics) for family in families)


def families_of_cards(found: Snapshot, *assignments: Assignment, **settings: Any) -> list[Metric]:
    """The cards' families that have a sample; arguments as of `page_of_cards`."""
    return parsed(page_of_cards(found, *assignments, **settings), openmetrics=False)


def own_page(state: AgentState, *, openmetrics: bool = False) -> bytes:
    """The agent's own part of the page, but for ``process_*``."""
    families = own_metrics.families(state)
    return b"".join(family.render(openmetrics=openmetrics) for family in families)


def families(state: AgentState) -> list[Metric]:
    """The agent's own families that have a sample, but for ``process_*``."""
    return parsed(own_page(state), openmetrics=False)


Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(metrics: Iterable[Metric]) -> Series:
    """The samples by name and labels; fails where one is there twice."""
    found: Series = {}
    for metric in metrics:
        for sample in metric.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def values(metrics: Iterable[Metric], name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The values of the samples called `name`, by these of their labels (``-`` where absent)."""
    found: dict[tuple[str, ...], float] = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name == name:
                key = tuple(sample.labels.get(label, "-") for label in labels)
                assert key not in found, f"twice: {key}"
                found[key] = sample.value
    return found


def parsed(page: bytes, *, openmetrics: bool) -> list[Metric]:
    """A page as prometheus_client reads it; fails where a series is there twice."""
    parse = parse_openmetrics if openmetrics else parse_text
    metrics = list(parse(page.decode()))
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names)), "a family is there twice"
    assert not page or page.endswith(b"\n")
    # The parser of OpenMetrics drops what is there twice in a row without a word.
    lines = [line for line in page.decode().split("\n") if line and not line.startswith("#")]
    assert len(lines) == len(series(metrics))
    return metrics
