"""What /metrics says of the cards and of who holds them: a Snapshot in, metric families out. Pure.

Names and units are those of each card's vendor (`npu_agent.core.vocabulary.MetricSchema`); labels
are the same for all. All families are gauges, also those that a vendor calls ``_total``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain

from prometheus_client.metrics_core import Metric

from npu_agent.core.hardware import (
    Card,
    CardState,
    CoreRange,
    CoreReading,
    HealthState,
    Reading,
    SensorKind,
    Snapshot,
)
from npu_agent.core.ledger import Assignment
from npu_agent.core.offer import split_id
from npu_agent.core.vocabulary import MetricName, MetricSchema, Quantity
from npu_agent.outputs.prometheus.text import Definition, Labels, Samples, clean, finite


@dataclass(frozen=True, slots=True)
class Hold:
    """Cores of a card that a container holds."""

    cores: CoreRange
    resource: str
    container: tuple[str, str, str]
    """Which one: its namespace, its Pod and its name."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A card, and what the labels of its series are."""

    state: CardState
    identity: Labels
    """What it is and where; neither the cores nor who holds them."""
    labels: Labels
    """Of a series about the whole card."""
    cores: tuple[tuple[CoreReading, Labels], ...]
    """The readings of its cores, each with the labels of a series about that core."""
    holds: tuple[Hold, ...]


Cards = tuple[Shown, ...]
Definitions = tuple[Definition[Cards], ...]


def families(
    snapshot: Snapshot,
    assignments: Iterable[Assignment],
    *,
    schemas: tuple[MetricSchema, ...],
    hostname: str,
    pod_labels: bool,
    resources: Collection[str],
) -> list[Metric]:
    """All families about cards that have a sample.

    Args:
        snapshot: the cards.
        assignments: who holds what.
        schemas: each vendor's names and units.
        hostname: the Node's name, for the label.
        pod_labels: whether series name the container that alone holds what they are about.
        resources: those that are ours; an assignment of another one is nobody's business here.
    """
    cards = shown(
        snapshot, assignments, hostname=hostname, pod_labels=pod_labels, resources=resources
    )
    metrics = [definition.metric(cards) for definition in definitions(schemas)]
    return [metric for metric in metrics if metric.samples]


def shown(
    snapshot: Snapshot,
    assignments: Iterable[Assignment],
    *,
    hostname: str,
    pod_labels: bool,
    resources: Collection[str],
) -> Cards:
    """The cards with the labels of their series; arguments as of `families`."""
    holds = _holds(snapshot, (one for one in assignments if one.resource in resources))
    return tuple(
        _shown(state, hostname, holds.get(state.id, ()), pod_labels) for state in snapshot.cards
    )


def recent(snapshot: Snapshot, since: float) -> Snapshot:
    """The same without readings from before `since` (`time.monotonic`).

    A card that stopped answering keeps its last reading; its figures must not be shown for ever.
    """
    if all(state.reading is None or state.reading.at >= since for state in snapshot.cards):
        return snapshot
    cards = (
        replace(state, reading=None) if state.reading and state.reading.at < since else state
        for state in snapshot.cards
    )
    return replace(snapshot, cards=tuple(cards))


def _holds(snapshot: Snapshot, assignments: Iterable[Assignment]) -> dict[str, tuple[Hold, ...]]:
    """Who holds which cores, by card ID; of cards that are in the Snapshot."""
    every = {state.id: state.card.all_cores for state in snapshot.cards}
    found: dict[str, list[Hold]] = {}
    for one in assignments:
        # An ID of a whole card may look like one of a part; the cards that there are decide.
        card, cores = (one.device, None) if one.device in every else split_id(one.device)
        if card not in every:
            continue
        if cores is None:
            cores = every[card]
        if cores.first <= cores.last and every[card].includes(cores):
            container = (one.namespace, one.pod, one.container)
            found.setdefault(card, []).append(Hold(cores, one.resource, container))
    return {card: tuple(holds) for card, holds in found.items()}


def _shown(state: CardState, hostname: str, holds: tuple[Hold, ...], pod_labels: bool) -> Shown:
    readings = state.reading.cores if state.reading else ()
    numbers = tuple(core.core for core in readings)
    labels = _labels(state.card, hostname, holds if pod_labels else (), numbers)
    return Shown(
        state=state,
        identity=labels[0],
        labels=labels[1],
        cores=tuple(zip(readings, labels[2:], strict=True)),
        holds=holds,
    )


@lru_cache(32)
def _labels(
    card: Card, hostname: str, named: tuple[Hold, ...], cores: tuple[int, ...]
) -> tuple[Labels, ...]:
    """The labels that say what the card is, those of the card, and those of each core.

    Kept, as they are the same from reading to reading; the bound is one of memory.
    """
    identity = Labels(
        arch=card.family,
        device=card.name,
        uuid=card.uuid,
        pci_bus_id=card.pci_bus_id,
        driver_version=card.driver_version,
        firmware_version=card.firmware_version,
        hostname=hostname,
    )
    all_cores = card.all_cores
    return (
        identity,
        identity.plus(core=str(all_cores), **_holder(named)),
        *(identity.plus(core=str(core), **_holder(named, core)) for core in cores),
    )


def _holder(holds: tuple[Hold, ...], core: int | None = None) -> dict[str, str]:
    """Labels that name the container which has these holds, on this core, if it is one alone."""
    containers = {
        hold.container
        for hold in holds
        if core is None or hold.cores.first <= core <= hold.cores.last
    }
    if len(containers) != 1:
        return {}
    return dict(zip(_HOLDER, *containers, strict=True))


_HOLDER = ("namespace", "pod", "container")


def _of_card(value: Callable[[Reading], float | None]) -> Callable[[Cards], Samples]:
    def samples(cards: Cards) -> Samples:
        for card in cards:
            if card.state.reading:
                yield card.labels, value(card.state.reading)

    return samples


def _of_core(value: Callable[[CoreReading], float | None]) -> Callable[[Cards], Samples]:
    def samples(cards: Cards) -> Samples:
        for card in cards:
            for core, labels in card.cores:
                yield labels, value(core)

    return samples


def _sensors(kind: SensorKind, per_unit: int, renamed: Mapping[str, str], cards: Cards) -> Samples:
    """A series for each sensor of the kind, whose values are divided by `per_unit`."""
    for card in cards:
        if card.state.reading is None:
            continue
        sensors = [sensor for sensor in card.state.reading.sensors if sensor.kind is kind]
        names = _unique([renamed.get(sensor.label, sensor.label) for sensor in sensors])
        for sensor, name in zip(sensors, names, strict=True):
            value = finite(sensor.value)
            if value is not None and per_unit > 1:  # divided by 1, an integer would be a float
                value /= per_unit
            yield card.labels.named(name), value


def _errors(cards: Cards) -> Samples:
    for card in cards:
        counters = card.state.reading.errors if card.state.reading else ()
        names = _unique([name for name, _ in counters])
        for name, (_, count) in zip(names, counters, strict=True):
            yield card.labels.named(name), count


def _unique(names: Iterable[str]) -> Iterator[str]:
    """The names, of which the second ``temp`` becomes ``temp_2`` and the third ``temp_3``.

    A driver may label two sensors alike, and Prometheus refuses a page with one series twice.
    """
    names = [clean(name) for name in names]
    taken = set(names)
    seen: set[str] = set()
    for name in names:
        number, chosen = 2, name
        if name in seen:
            while (chosen := f"{name[:_STEM]}_{number}") in taken:
                number += 1
        seen.add(chosen)
        taken.add(chosen)
        yield chosen


_STEM = 200
"""Characters of a name that get a number appended: the longest ones would lose it again."""


def _info(cards: Cards) -> Samples:
    for card in cards:
        it = card.state.card
        numa = None if it.numa_node is None else str(it.numa_node)
        yield card.labels.plus(product=it.product, serial=it.serial, numa_node=numa), 1


def _health(cards: Cards) -> Samples:
    """Each state, as kube-state-metrics shows the phases of a Pod: 1 is the one it is in.

    The reason is only with an unhealthy or unknown state that is the present one: so the series of
    ``healthy`` is one and the same for the card's whole life, and its average is the availability.
    """
    for card in cards:
        health = card.state.health
        for state in HealthState:
            now = health.state is state
            reason = health.reason if now and state is not HealthState.HEALTHY else None
            yield card.labels.plus(state=state.value, reason=reason), now


def _assigned(cards: Cards) -> Samples:
    for card in cards:
        for hold in card.holds:
            holder = dict(zip(_HOLDER, hold.container, strict=True))
            yield card.identity.plus(core=str(hold.cores), resource=hold.resource, **holder), 1


_SAMPLES: dict[Quantity, Callable[[Cards], Samples]] = {
    Quantity.ALIVE: _of_card(lambda reading: reading.alive),
    Quantity.UPTIME: _of_card(lambda reading: reading.uptime),
    Quantity.ERRORS: _errors,
    Quantity.UTILIZATION: _of_core(lambda core: core.utilization),
    Quantity.FREQUENCY: _of_core(lambda core: core.frequency),
    Quantity.DRAM_TOTAL: _of_core(lambda core: core.dram_total),
    Quantity.DRAM_USED: _of_core(lambda core: core.dram_used),
    Quantity.CYCLES: _of_core(lambda core: core.cycles),
    Quantity.TASK_CYCLES: _of_core(lambda core: core.task_cycles),
    Quantity.INFO: _info,
    Quantity.HEALTH: _health,
    Quantity.ASSIGNED: _assigned,
}


@lru_cache(16)
def definitions(schemas: tuple[MetricSchema, ...]) -> Definitions:
    """The families of these schemas, in the order of the page.

    Each schema describes the cards of its vendor. A name that two vendors use is one family, with
    the help of the first: Prometheus refuses a page that has it twice.
    """
    named: dict[str, list[tuple[MetricSchema, MetricName]]] = {}
    for schema in schemas:
        for metric in schema.metrics:
            named.setdefault(metric.name, []).append((schema, metric))
    return tuple(
        Definition(name=name, help=uses[0][1].help, samples=partial(_of_vendors, tuple(uses)))
        for name, uses in named.items()
    )


def _of_vendors(uses: tuple[tuple[MetricSchema, MetricName], ...], cards: Cards) -> Samples:
    return chain.from_iterable(
        _samples(schema, metric)(
            tuple(card for card in cards if card.state.card.family in schema.families)
        )
        for schema, metric in uses
    )


def _samples(schema: MetricSchema, metric: MetricName) -> Callable[[Cards], Samples]:
    if metric.sensors is not None:
        return partial(_sensors, metric.sensors, metric.per_unit, schema.renamed)
    return _SAMPLES[metric.quantity]
