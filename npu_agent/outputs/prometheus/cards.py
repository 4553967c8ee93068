"""What /metrics says of the cards and of who holds them: a Snapshot in, metric families out. Pure.

Names, units and labels are the vendor's, in two generations ("schemas") that share names with other
units and so are never served together: docs/metrics.md. All are gauges, the vendor's ``_total`` and
``_count`` among them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from prometheus_client.metrics_core import Metric

from npu_agent.core.hardware import (
    Card,
    CardState,
    CoreRange,
    CoreReading,
    Reading,
    SensorKind,
    Snapshot,
    State,
)
from npu_agent.core.ledger import Assignment
from npu_agent.core.offer import split_id
from npu_agent.outputs.prometheus.text import Definition, Labels, Samples, clean, finite

SCHEMAS = ("0.8", "2025")
"""Generations of names and units, as the config key metrics.schema has them."""


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
    schema: str,
    hostname: str,
    pod_labels: bool,
    resources: Collection[str],
) -> list[Metric]:
    """All families about cards that have a sample.

    Args:
        snapshot: the cards.
        assignments: who holds what.
        schema: one of `SCHEMAS`.
        hostname: the Node's name, for the label.
        pod_labels: whether series name the container that alone holds what they are about.
        resources: those that are ours; an assignment of another one is nobody's business here.
    """
    cards = shown(
        snapshot, assignments, hostname=hostname, pod_labels=pod_labels, resources=resources
    )
    metrics = [definition.metric(cards) for definition in DEFINITIONS[schema]]
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

    The reason is only with an unhealthy or unknown state that is the one of now: so the series of
    ``healthy`` is one and the same for the card's whole life, and its average is the availability.
    """
    for card in cards:
        health = card.state.health
        for state in State:
            now = health.state is state
            reason = health.reason if now and state is not State.HEALTHY else None
            yield card.labels.plus(state=state.value, reason=reason), now


def _assigned(cards: Cards) -> Samples:
    for card in cards:
        for hold in card.holds:
            holder = dict(zip(_HOLDER, hold.container, strict=True))
            yield card.identity.plus(core=str(hold.cores), resource=hold.resource, **holder), 1


_SENSORS = {
    "0.8": (
        ("temperature", "m°C (thousandths of 1 °C)", SensorKind.TEMPERATURE, 1),
        ("power", "µW (millionths of 1 W)", SensorKind.POWER, 1),
        ("voltage", "mV (thousandths of 1 V)", SensorKind.VOLTAGE, 1),
        ("current", "mA (thousandths of 1 A)", SensorKind.CURRENT, 1),
    ),
    "2025": (
        ("temperature", "°C", SensorKind.TEMPERATURE, 1_000),
        ("power", "W", SensorKind.POWER, 1_000_000),
        ("voltage", "mV (thousandths of 1 V)", SensorKind.VOLTAGE, 1),
        ("current", "mA (thousandths of 1 A)", SensorKind.CURRENT, 1),
    ),
}
"""For each schema the families of sensors: name, unit, kind, and by what values are divided."""

_RENAMED: dict[str, dict[str, str]] = {"0.8": {}, "2025": {"rms_total": "rms"}}
"""What the vendor's exporter calls a sensor, where that is not the driver's label."""


def _definitions(schema: str) -> Definitions:
    return (
        Definition(
            name="furiosa_npu_alive",
            help="Whether the driver says that the card works: 1 or 0.",
            samples=_of_card(lambda reading: reading.alive),
        ),
        Definition(
            name="furiosa_npu_uptime",
            help="Seconds since the firmware of the card started.",
            samples=_of_card(lambda reading: reading.uptime),
        ),
        Definition(
            name="furiosa_npu_error",
            help="Errors that the driver has counted, by kind (label).",
            samples=_errors,
        ),
        *(
            Definition(
                name=f"furiosa_npu_hw_{what}",
                help=f"The {what} in {unit}, by sensor (label).",
                samples=partial(_sensors, kind, per_unit, _RENAMED[schema]),
            )
            for what, unit, kind, per_unit in _SENSORS[schema]
        ),
        Definition(
            name="furiosa_npu_core_utilization",
            help="Per cent of the core's cycles spent on tasks between the last two readings.",
            samples=_of_core(lambda core: core.utilization),
        ),
        Definition(
            name="furiosa_npu_core_frequency",
            help="The clock of the core in MHz.",
            samples=_of_core(lambda core: core.frequency),
        ),
        Definition(
            name="furiosa_npu_dram_total",
            help="Bytes of the card's memory that the user of the core may take.",
            samples=_of_core(lambda core: core.dram_total),
        ),
        Definition(
            name="furiosa_npu_dram_usage",
            help="Bytes of the card's memory that the user of the core has taken.",
            samples=_of_core(lambda core: core.dram_used),
        ),
        Definition(
            name="furiosa_npu_total_cycle_count",
            help="Cycles that the core has counted so far.",
            samples=_of_core(lambda core: core.cycles),
        ),
        Definition(
            name="furiosa_npu_task_execution_cycle",
            help="Cycles that the core has spent on tasks so far.",
            samples=_of_core(lambda core: core.task_cycles),
        ),
        Definition(
            name="furiosa_npu_info",
            help="What the card is, in its labels; always 1.",
            samples=_info,
        ),
        Definition(
            name="furiosa_npu_health",
            help="The health of the card: 1 for the state that it is in, 0 for the others.",
            samples=_health,
        ),
        Definition(
            name="furiosa_npu_assigned",
            help="The container that holds cores of the card; always 1.",
            samples=_assigned,
        ),
    )


DEFINITIONS: dict[str, Definitions] = {schema: _definitions(schema) for schema in SCHEMAS}
"""The families of each schema, in the order of the page."""
