import math
from dataclasses import replace

import pytest

from npu_agent.core.hardware import CardState, CoreReading, Reading, Sensor, SensorKind, Snapshot
from npu_agent.feed import Feed
from npu_agent.outputs.web.history import MOST, STEP, History, Track, step_of
from tests.outputs.deviceplugin.helpers import state


def at(
    when: float, temperature: float | None = 40.0, load: float | None = 10.0, index: int = 0
) -> CardState:
    sensors: tuple[Sensor, ...] = ()
    if temperature is not None:
        sensors = (Sensor(SensorKind.TEMPERATURE, "peak", round(temperature * 1_000)),)
    cores = tuple(CoreReading(core=core, utilization=load) for core in range(2))
    return replace(state(index=index), reading=Reading(at=when, sensors=sensors, cores=cores))


def track(*cards: CardState) -> Track:
    found = History(Feed(Snapshot()))
    for card in cards:
        found.add(Snapshot(cards=(card,), complete=True))
    return found.of("WARBOY-0")


def test_each_step_is_a_point() -> None:
    points = track(*(at(STEP * n, 40.0 + n) for n in range(10)))
    assert [point.step for point in points] == list(range(10))
    assert [point.figures.temperature for point in points] == [40.0 + n for n in range(10)]
    assert points[0].figures.load == 10.0
    assert math.isnan(points[0].figures.power)


def test_a_point_has_the_highest_temperature_and_the_mean_load_each_reading_once() -> None:
    (point,) = track(at(5.0, 90.0, 10.0), at(10.0, 41.0, 40.0), at(10.0, 41.0, 40.0))
    assert (point.figures.temperature, point.figures.load) == (90.0, 25.0)


@pytest.mark.parametrize("interval", [5.0, 600.0])
def test_the_history_is_an_hour_and_bounded(interval: float) -> None:
    points = track(*(at(interval * n) for n in range(2_000)))
    assert len(points) == min(MOST, 3600 / interval)
    assert points[-1].step == step_of(interval * 1_999)
    assert points[-1].step - points[0].step < MOST


def test_an_unknown_value_is_no_number_and_spoils_none() -> None:
    (point,) = track(at(1.0, None, None), at(2.0, 41.0, 30.0), at(3.0, None, 1e300))
    assert point.figures.temperature == 41.0
    assert point.figures.load > 30.0


def test_a_card_that_goes_is_forgotten() -> None:
    found = History(Feed(Snapshot()))
    for card in (at(1.0), at(6.0, index=1)):
        found.add(Snapshot(cards=(card,), complete=True))
    assert (len(found.of("WARBOY-0")), len(found.of("WARBOY-1"))) == (0, 1)
