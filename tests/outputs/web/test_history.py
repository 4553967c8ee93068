import asyncio
import math
from array import array
from dataclasses import replace

import pytest

from npu_agent.core.hardware import CardState, CoreReading, Reading, Sensor, SensorKind, Snapshot
from npu_agent.feed import Feed
from npu_agent.outputs.web.history import MOST, SPAN, STEP, History, Track, step_of
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
    points = track(*(at(30.0 * n, 40.0 + n) for n in range(10)))
    assert list(points.steps) == list(range(10))
    assert list(points.temperature) == [40.0 + n for n in range(10)]
    assert points.load[0] == 10.0
    assert math.isnan(points.power[0])


def test_the_same_reading_counts_once() -> None:
    points = track(at(5.0, load=10.0), at(10.0, load=40.0), at(10.0, load=40.0))
    assert list(points.steps) == [0]
    assert points.load[0] == 25.0


def test_it_is_an_hour_and_bounded() -> None:
    points = track(*(at(5.0 * n) for n in range(2_000)))
    assert len(points.steps) == MOST == SPAN // STEP
    assert len(points.temperature) == len(points.power) == len(points.load) == MOST
    assert points.steps[-1] == step_of(5.0 * 1_999)
    assert points.steps[-1] - points.steps[0] == MOST - 1


def test_slow_readings_are_not_kept_for_longer() -> None:
    points = track(*(at(600.0 * n) for n in range(100)))
    assert list(points.steps) == [step_of(600.0 * n) for n in range(94, 100)]


def test_the_hottest_of_readings_that_share_a_point_is_kept() -> None:
    temperatures = [40.0] * 100
    temperatures[33] = 90.0
    points = track(*(at(0.5 * n, t) for n, t in enumerate(temperatures)))
    assert max(points.temperature) == 90.0


def test_what_is_not_known_is_no_number_and_spoils_none() -> None:
    points = track(at(1.0, None, None))
    assert math.isnan(points.temperature[0])
    assert math.isnan(points.load[0])
    points = track(at(1.0, None, None), at(2.0, 41.0, 30.0))
    assert (points.temperature[0], points.load[0]) == (41.0, 30.0)


def test_a_card_that_goes_is_forgotten() -> None:
    found = History(Feed(Snapshot()))
    found.add(Snapshot(cards=(at(1.0),), complete=True))
    found.add(Snapshot(cards=(at(6.0, index=1),), complete=True))
    assert len(found.of("WARBOY-0").steps) == 0
    assert len(found.of("WARBOY-1").steps) == 1


def test_an_hour_of_a_card_is_small() -> None:
    """64 cards within 150 kB: the agent is on every node, the page is seldom open."""
    points = track(*(at(5.0 * n) for n in range(2_000)))
    columns = (points.steps, points.temperature, points.power, points.load)
    assert all(isinstance(column, array) for column in columns)
    assert sum(column.itemsize * len(column) for column in columns) * 64 < 150_000


@pytest.mark.parametrize("value", [1e300, -1e300])
def test_nonsense_is_no_failure(value: float) -> None:
    assert len(track(at(1.0, load=value), at(2.0, load=value)).steps) == 1


async def test_it_follows_the_snapshots() -> None:
    feed = Feed(Snapshot())
    found = History(feed)
    running = asyncio.create_task(found.run())
    feed.publish(Snapshot(cards=(at(1.0),), complete=True))
    async with asyncio.timeout(20):
        while not found.of("WARBOY-0").steps:
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
