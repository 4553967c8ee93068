import asyncio
import math
from dataclasses import replace

from npu_agent.core.hardware import CardState, CoreReading, Reading, Sensor, SensorKind, Snapshot
from npu_agent.feed import Feed
from npu_agent.outputs.web.history import SPAN, History
from tests.outputs.deviceplugin.helpers import state


def at(
    when: float, temperature: float | None = 40.0, load: float | None = 10.0, index: int = 0
) -> CardState:
    sensors: tuple[Sensor, ...] = ()
    if temperature is not None:
        sensors = (Sensor(SensorKind.TEMPERATURE, "peak", round(temperature * 1_000)),)
    cores = tuple(CoreReading(core=core, utilization=load) for core in range(2))
    return replace(state(index=index), reading=Reading(at=when, sensors=sensors, cores=cores))


def history(*cards: CardState) -> History:
    found = History(Feed(Snapshot()))
    for card in cards:
        found.add(Snapshot(cards=(card,), complete=True))
    return found


def test_each_reading_is_a_point() -> None:
    points = history(*(at(5.0 * n, 40.0 + n) for n in range(10))).of("WARBOY-0")
    assert [point.at for point in points] == [5.0 * n for n in range(10)]
    assert [point.temperature for point in points] == [40.0 + n for n in range(10)]
    assert points[0].load == 10.0
    assert math.isnan(points[0].power)


def test_the_same_reading_counts_once() -> None:
    assert len(history(at(5.0), at(5.0), at(5.0)).of("WARBOY-0")) == 1


def test_it_is_bounded_in_time_and_number() -> None:
    points = history(*(at(0.5 * n) for n in range(4_000))).of("WARBOY-0")
    assert 55 <= len(points) <= 62
    assert points[-1].at - points[0].at <= SPAN
    assert points[-1].at > 1_999


def test_slow_readings_are_not_kept_for_longer() -> None:
    points = history(*(at(60.0 * n) for n in range(100))).of("WARBOY-0")
    assert [point.at for point in points] == [60.0 * n for n in range(94, 100)]


def test_the_hottest_of_readings_that_share_a_point_is_kept() -> None:
    temperatures = [40.0] * 100
    temperatures[33] = 90.0
    points = history(*(at(0.5 * n, t) for n, t in enumerate(temperatures))).of("WARBOY-0")
    assert max(point.temperature for point in points) == 90.0


def test_what_is_not_known_is_no_number() -> None:
    (point,) = history(at(1.0, None, None)).of("WARBOY-0")
    assert math.isnan(point.temperature)
    assert math.isnan(point.load)


def test_a_card_that_goes_is_forgotten() -> None:
    found = history(at(1.0), at(6.0))
    found.add(Snapshot(cards=(at(6.0, index=1),), complete=True))
    assert found.of("WARBOY-0") == ()
    assert len(found.of("WARBOY-1")) == 1


async def test_it_follows_the_snapshots() -> None:
    feed = Feed(Snapshot())
    found = History(feed)
    running = asyncio.create_task(found.run())
    feed.publish(Snapshot(cards=(at(1.0),), complete=True))
    async with asyncio.timeout(20):
        while not found.of("WARBOY-0"):
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
