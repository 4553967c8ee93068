"""Metrics of cards and their holders: values in, metric families out. Pure.

Start reading at `series` and `families`.

Names and units are the vendor's (`npu_agent.core.vendor.MetricSchema`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from npu_agent.core.hardware import (
    Card,
    CardState,
    CoreReading,
    Health,
    HealthState,
    Reading,
    SensorKind,
)
from npu_agent.core.ledger import Assignment, Usage
from npu_agent.core.state import AgentState
from npu_agent.core.vendor import MetricName, MetricSchema, MetricSource
from npu_agent.outputs.prometheus.text import MetricFamily, Samples, finite, label_text


@dataclass(frozen=True, slots=True)
class CardSeries:
    """A card, and what the labels of its series are."""

    state: CardState
    identity: str
    labels: str
    cores: tuple[tuple[CoreReading, str], ...]
    holdings: tuple[Usage, ...]


Cards = tuple[CardSeries, ...]
Numbers = Iterable[tuple[str, float | None]]
"""Labels and values: `Samples` without histograms."""


def series(agent: AgentState, *, pod_labels: bool) -> Cards:
    """The cards with the labels of their series; none until all of them were read.

    With `pod_labels`, series name the one container that holds their subject.
    """
    if not agent.snapshot.complete:
        return ()
    return tuple(_series(state, agent, pod_labels) for state in agent.snapshot.cards)


def _series(state: CardState, agent: AgentState, pod_labels: bool) -> CardSeries:
    if agent.is_stale(state):  # a card that stopped answering keeps its last one
        state = replace(state, reading=None)

    card = state.card
    holdings = agent.usages_of(state)
    named = holdings if pod_labels else ()
    identity = label_text(
        arch=card.family,
        device=card.name,
        uuid=card.uuid,
        pci_bus_id=card.pci_bus_id,
        driver_version=card.driver_version,
        firmware_version=card.firmware_version,
        hostname=agent.hostname,
    )
    return CardSeries(
        state=state,
        identity=identity,
        labels=label_text(identity, core=str(card.all_cores), **_sole_holder(named)),
        cores=tuple(
            (
                core,
                label_text(
                    identity,
                    core=str(core.core),
                    **_sole_holder(usage for usage in named if core.core in usage.cores),
                ),
            )
            for core in (state.reading.cores if state.reading else ())
        ),
        holdings=holdings,
    )


def _sole_holder(holdings: Iterable[Usage]) -> dict[str, str | None]:
    holders = [_holder(usage.assignment) for usage in holdings]
    return holders[0] if holders and all(holder == holders[0] for holder in holders) else {}


def _holder(assignment: Assignment) -> dict[str, str | None]:
    container = assignment.container or None  # of a claim it is not always known
    return {"namespace": assignment.namespace, "pod": assignment.pod, "container": container}


def _readings(cards: Cards) -> Iterator[tuple[str, Reading]]:
    """The cards that were read: the labels of their series, and the reading."""
    for card in cards:
        if card.state.reading:
            yield card.labels, card.state.reading


def _of_card(value: Callable[[Reading], float | None]) -> Callable[[Cards], Numbers]:
    def samples(cards: Cards) -> Numbers:
        for labels, reading in _readings(cards):
            yield labels, value(reading)

    return samples


def _of_core(value: Callable[[CoreReading], float | None]) -> Callable[[Cards], Numbers]:
    def samples(cards: Cards) -> Numbers:
        for card in cards:
            for core, labels in card.cores:
                yield labels, value(core)

    return samples


def _of_link(figures: Callable[[Card], tuple[float, float] | None]) -> Callable[[Cards], Numbers]:
    def samples(cards: Cards) -> Numbers:
        for card in cards:
            now, _ = figures(card.state.card) or (None, None)
            yield card.labels, now

    return samples


def _sensors(kind: SensorKind, renamed: Mapping[str, str], cards: Cards) -> Numbers:
    for labels, reading in _readings(cards):
        sensors = [sensor for sensor in reading.sensors if sensor.kind is kind]
        names = _unique(renamed.get(sensor.label, sensor.label) for sensor in sensors)
        for sensor, name in zip(sensors, names, strict=True):
            yield label_text(labels, label=name), sensor.value


def _errors(cards: Cards) -> Numbers:
    for labels, reading in _readings(cards):
        names = _unique(name for name, _ in reading.errors)
        for name, (_, count) in zip(names, reading.errors, strict=True):
            yield label_text(labels, label=name), count


def _throttle(cards: Cards) -> Numbers:
    for labels, reading in _readings(cards):
        for reason, _ in reading.throttled:
            yield label_text(labels, label=reason), reason in (reading.throttle or ())


def _throttled(cards: Cards) -> Numbers:
    for labels, reading in _readings(cards):
        for reason, count in reading.throttled:
            yield label_text(labels, label=reason), count


def _unique(names: Iterable[str]) -> Iterator[str]:
    """The names, of which the second ``temp`` becomes ``temp_2`` and the third ``temp_3``."""
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        yield f"{name}_{seen[name]}" if seen[name] > 1 else name


def _info(cards: Cards) -> Numbers:
    for card in cards:
        it = card.state.card
        numa = None if it.numa_node is None else str(it.numa_node)
        facts = {"product": it.product, "serial": it.serial, "numa_node": numa}
        simulated = "true" if it.simulated else None
        yield label_text(card.labels, **facts, simulated=simulated), 1


def _health(cards: Cards) -> Numbers:
    """Yields each health state as kube-state-metrics does a Pod's phases: 1 for the current.

    The reason is only with an unhealthy or unknown state that is the present one: so the series of
    ``healthy`` is one and the same for the card's whole life, and its average is the availability.
    """
    for card in cards:
        health = card.state.health
        for state in HealthState:
            now = health.state is state
            reason = _reason(health) if now and state is not HealthState.HEALTHY else None
            yield label_text(card.labels, state=state.value, reason=reason), now


def _reason(health: Health) -> str:
    """Returns one of few reasons: `Health.reason` may quote the driver or a measured value."""
    return health.cause.value if health.cause else "silent"


def _assigned(cards: Cards) -> Numbers:
    for card in cards:
        for holding in card.holdings:
            it = holding.assignment
            holder = {"resource": it.resource, **_holder(it), "claim": it.claim or None}
            yield label_text(card.identity, core=str(holding.cores), **holder), 1


_SAMPLES: dict[MetricSource, Callable[[Cards], Numbers]] = {
    MetricSource.ALIVE: _of_card(lambda reading: reading.alive),
    MetricSource.UPTIME: _of_card(lambda reading: reading.uptime),
    MetricSource.ERRORS: _errors,
    MetricSource.THROTTLE: _throttle,
    MetricSource.THROTTLED: _throttled,
    MetricSource.POWER_LIMIT: _of_card(lambda reading: reading.limits.power),
    MetricSource.SLOWDOWN: _of_card(lambda reading: reading.limits.slowdown),
    MetricSource.LINK_LANES: _of_link(lambda card: card.lanes),
    MetricSource.LINK_SPEED: _of_link(lambda card: card.link_speed),
    MetricSource.UTILIZATION: _of_core(lambda core: core.utilization),
    MetricSource.FREQUENCY: _of_core(lambda core: core.frequency),
    MetricSource.DRAM_TOTAL: _of_core(lambda core: core.dram_total),
    MetricSource.DRAM_USED: _of_core(lambda core: core.dram_used),
    MetricSource.CYCLES: _of_core(lambda core: core.cycles),
    MetricSource.TASK_CYCLES: _of_core(lambda core: core.task_cycles),
    MetricSource.INFO: _info,
    MetricSource.HEALTH: _health,
    MetricSource.ASSIGNED: _assigned,
}


def families(schema: MetricSchema, cards: Cards) -> tuple[MetricFamily, ...]:
    """The families of a schema, in their order."""
    return tuple(
        MetricFamily(
            name=metric.name,
            kind=metric.kind,
            help=metric.text,
            samples=_samples(metric, schema.renamed, cards),
        )
        for metric in schema.metrics
    )


def _samples(metric: MetricName, renamed: Mapping[str, str], cards: Cards) -> Samples:
    samples = (
        _SAMPLES[metric.source](cards)
        if metric.sensors is None
        else _sensors(metric.sensors, renamed, cards)
    )
    # Divided by 1, an integer would be a float.
    return samples if metric.per_unit == 1 else _divided(samples, metric.per_unit)


def _divided(samples: Numbers, per_unit: float) -> Samples:
    for labels, number in samples:
        value = finite(number)
        yield labels, None if value is None else value / per_unit
