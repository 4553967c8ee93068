"""What is said of cards and of who holds them; whole pages are in test_golden."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric

from npu_agent.core.hardware import CardState, Cause, CoreReading, HealthState, Sensor, SensorKind
from npu_agent.core.ledger import Assignment, Usage
from npu_agent.outputs.prometheus import cards
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from tests.outputs.helpers import RESOURCE
from tests.outputs.prometheus.helpers import (
    card,
    families_of_cards,
    full_reading,
    held,
    own,
    page_of_cards,
    parsed,
    reading,
    series,
    snapshot,
    values,
)
from tests.outputs.prometheus.test_text import NUMBERS, TEXTS

POD = ("namespace", "pod", "container")
SENSOR = SensorKind.TEMPERATURE
FULL = card(uuid="UUID-A", reading=full_reading(cores=8))


def names(metrics: list[Metric]) -> list[str]:
    return [metric.name.removeprefix("furiosa_npu_") for metric in metrics]


def test_an_unknown_value_is_no_series_and_no_label() -> None:
    bare = card("warboy", reading=reading())
    found = families_of_cards(snapshot(bare))
    assert names(found) == ["info", "health"]
    (info,) = found[0].samples
    assert set(info.labels) == {"arch", "device", "core", "hostname", "product"}
    assert info.labels["core"] == "0-1"
    assert names(families_of_cards(snapshot(card("warboy")))) == ["info", "health"]
    some = reading(alive=False, cores=(CoreReading(core=1, utilization=0.0),))
    found = families_of_cards(snapshot(card("warboy", reading=some)))
    assert values(found, "furiosa_npu_alive") == {(): 0}
    assert values(found, "furiosa_npu_core_utilization", "core") == {("1",): 0}
    assert names(found) == ["alive", "core_utilization", "info", "health"]


@pytest.mark.parametrize(
    ("state", "cause", "reason"),
    [
        (HealthState.HEALTHY, None, "-"),
        (HealthState.UNHEALTHY, Cause.DEAD, "dead"),
        (HealthState.UNKNOWN, None, "silent"),
    ],
)
def test_health_is_one_of_three_and_says_why_it_is_not_good(
    state: HealthState, cause: Cause | None, reason: str
) -> None:
    found = families_of_cards(snapshot(card(state=state, cause=cause)))
    zeros = {(other.value, "-"): 0 for other in HealthState if other is not state}
    shown = values(found, "furiosa_npu_health", "state", "reason")
    assert shown == {(state.value, reason): 1, **zeros}


def test_a_holder_by_a_claim_has_no_container() -> None:
    holding = Usage(FULL.id, FULL.card.all_cores, replace(held("npu0"), container=""))
    state = own(snapshot=snapshot(FULL), usages=(holding,))
    (shown,) = cards.series(state, pod_labels=True)
    assert shown.labels.endswith('namespace="ml",pod="train-0"')


def test_cores_that_two_claim_name_neither() -> None:
    found = families_of_cards(snapshot(FULL), held("UUID-A", "one"), held("UUID-A_cores_0", "two"))
    cores = values(found, "furiosa_npu_core_utilization", "core", "pod")
    assert [pod for _, pod in cores] == ["-", *["one"] * 7]


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "a"], ["a", "a_2", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_2"]),
    ],
)
@pytest.mark.parametrize("schema", SCHEMAS)
def test_sensors_with_the_same_label_are_numbered(
    schema: str, labels: list[str], shown: list[str]
) -> None:
    sensors = tuple(Sensor(SENSOR, label, 1_000) for label in labels)
    found = families_of_cards(
        snapshot(card(reading=reading(sensors=sensors))), schema=SCHEMAS[schema]
    )
    (name,) = (one.name for one in SCHEMAS[schema].metrics if one.sensors is SENSOR)
    assert [label for (label,) in values(found, name, "label")] == shown


def test_a_sensor_may_have_the_name_that_another_is_given() -> None:
    sensors = tuple(Sensor(SensorKind.POWER, label, 1) for label in ("rms", "rms_total"))
    found = families_of_cards(
        snapshot(card(reading=reading(sensors=sensors))), schema=SCHEMAS["2025"]
    )
    assert set(values(found, "furiosa_npu_hw_power", "label")) == {("rms",), ("rms_2",)}


def _readings() -> st.SearchStrategy[Any]:
    whole = st.integers() | st.just(10**400)
    sensors = st.builds(Sensor, st.sampled_from(SensorKind), TEXTS, whole)
    numbers = st.one_of(st.none(), NUMBERS)
    cores = st.builds(
        CoreReading,
        core=st.integers(0, 9),
        utilization=numbers,
        frequency=numbers,
        cycles=numbers,
        task_cycles=numbers,
        dram_total=numbers,
        dram_used=numbers,
    )
    return st.builds(
        reading,
        st.just(0.0),
        alive=st.sampled_from((None, True, False)),
        uptime=numbers,
        errors=st.lists(st.tuples(TEXTS, whole), max_size=4).map(tuple),
        sensors=st.lists(sensors, max_size=6).map(tuple),
        cores=st.lists(cores, max_size=4).map(tuple),
    )


def _cards() -> st.SearchStrategy[list[CardState]]:
    text = st.none() | TEXTS
    return st.lists(
        st.builds(
            card,
            st.sampled_from(("rngd", "warboy")),
            st.integers(0, 3),
            state=st.sampled_from(HealthState),
            reason=TEXTS,
            reading=st.none() | _readings(),
            uuid=text,
            serial=text,
            pci_bus_id=text,
            driver_version=text,
            firmware_version=text,
        ),
        max_size=4,
        unique_by=lambda state: state.card.key,
    )


@settings(max_examples=50)
@given(st.data(), _cards(), st.sampled_from(sorted(SCHEMAS)), TEXTS, st.booleans())
def test_whatever_the_hardware_says_the_page_stays_readable(
    data: st.DataObject, found: list[CardState], schema: str, hostname: str, pod_labels: bool
) -> None:
    devices = [f"{state.id}{part}" for state in found for part in ("", "_cores_0", "_cores_1")]
    assignments = data.draw(
        st.lists(
            st.builds(
                Assignment,
                TEXTS,
                TEXTS,
                TEXTS,
                st.just(RESOURCE),
                st.sampled_from(devices) if devices else TEXTS,
            ),
            max_size=6,
        )
    )
    page, as_openmetrics = (
        page_of_cards(
            snapshot(*found),
            *assignments,
            schema=SCHEMAS[schema],
            hostname=hostname,
            pod_labels=pod_labels,
            openmetrics=openmetrics,
        )
        for openmetrics in (False, True)
    )
    told = parsed(page, openmetrics=False)
    assert series(told) == series(parsed(as_openmetrics + b"# EOF\n", openmetrics=True))
    info = [metric for metric in told if metric.name == "furiosa_npu_info"]
    assert len(series(info)) == len(found)


def test_the_info_of_a_simulated_card_says_so() -> None:
    real = card("warboy")
    simulated = replace(real, card=replace(real.card, simulated=True))
    for state, said in ((real, None), (simulated, "true")):
        (info,) = families_of_cards(snapshot(state))[0].samples
        assert info.labels.get("simulated") == said
