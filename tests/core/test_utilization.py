"""From counters to per cent, against cores whose true load is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.hardware import CoreRange, CoreReading
from npu_agent.core.utilization import LONGEST_PAUSE, Tally, UtilizationTracker

WRAP = 1 << 32
SINGLE, FUSED = CoreRange(0, 0), CoreRange(0, 1)
FREE = CoreReading(core=0, utilization=0.0)
DAMAGED = CoreReading(core=0)

U64 = st.integers(0, 2**64 - 1)
LOOKS = st.lists(
    st.one_of(
        st.just(FREE),
        st.just(DAMAGED),
        st.builds(
            CoreReading,
            core=st.just(0),
            utilization=st.sampled_from([None, 0.0]),
            cycles=st.none() | U64,
            task_cycles=st.none() | U64,
            source=st.sampled_from([SINGLE, FUSED]),
        ),
    ),
    max_size=12,
)


def look(cycles: int, task_cycles: int, source: CoreRange = SINGLE) -> CoreReading:
    """A core in use, as a Warboy's registers show it."""
    return CoreReading(core=0, cycles=cycles, task_cycles=task_cycles % WRAP, source=source)


def tally(*looks: CoreReading, wraps: bool = True) -> Tally:
    found = Tally()
    for one in looks:
        found = found.add(one, wraps=wraps)
    return found


# What is true of every core.


@given(
    cycles=st.integers(0, 2**63),
    task_cycles=st.integers(0, 2**63),
    clock=st.integers(1_000_000, 2_100_000_000),
    steps=st.lists(
        st.tuples(st.floats(0.01, LONGEST_PAUSE), st.floats(0, 1)), min_size=1, max_size=20
    ),
)
def test_utilization_is_the_true_load_however_often_counters_wrap(
    cycles: int, task_cycles: int, clock: int, steps: list[tuple[float, float]]
) -> None:
    begin = cycles, task_cycles
    found = tally(look(cycles, task_cycles))
    for seconds, load in steps:
        passed = round(seconds * clock)
        cycles, task_cycles = cycles + passed, task_cycles + round(passed * load)
        found = found.add(look(cycles, task_cycles), wraps=True)
    true = 100 * (task_cycles - begin[1]) / (cycles - begin[0])
    assert found.utilization() == pytest.approx(true)


@given(LOOKS, st.booleans())
def test_utilization_is_unknown_or_within_0_and_100(looks: list[CoreReading], wraps: bool) -> None:
    found = Tally()
    for one in looks:
        found = found.add(one, wraps=wraps)
        utilization = found.utilization()
        assert utilization is None or 0 <= utilization <= 100
        assert found.cycles >= found.task_cycles >= 0


# Single cases.


@pytest.mark.parametrize(
    ("looks", "utilization"),
    [
        pytest.param([FREE, look(1000, 900)], 0, id="just taken: it did nothing so far"),
        pytest.param([look(0, 0), look(1000, 900), FREE], 90, id="just released: what it did"),
        pytest.param([look(7, 3), look(7, 3)], None, id="a clock that stands still"),
        pytest.param([look(1000, 500), look(10, 5)], None, id="a reset"),
        pytest.param(
            [look(1000, 500), look(2000, 600), look(10, 5), look(1010, 305)],
            20,
            id="the interval of a reset is dropped, and the others count",
        ),
        # The task counter went back, and there was no time for it to come round.
        pytest.param([look(1000, 900), look(5000, 10)], None, id="a reset that more cycles hide"),
        pytest.param([look(0, 0), look(1000, 1003)], 100, id="a little more work than time"),
        pytest.param([look(0, WRAP - 3), look(1000, WRAP + 1000)], 100, id="and a wrap"),
        pytest.param([look(0, 0), look(WRAP, 100)], None, id="it may have wrapped more than once"),
        pytest.param([look(1000, 500), look(2000, 900, FUSED)], None, id="another entry's"),
        pytest.param(
            [look(1000, 500), look(2000, 900, FUSED), look(3000, 1200, FUSED)],
            30,
            id="counters of another entry are other counters",
        ),
        pytest.param(
            [look(0, 0), look(100, 50), DAMAGED, look(200, 100), look(300, 200)],
            75,
            id="a damaged look breaks the row and no more",
        ),
    ],
)
def test_the_utilization_after_some_looks(
    looks: list[CoreReading], utilization: float | None
) -> None:
    assert tally(*looks).utilization() == utilization


def test_counters_of_64_bits_do_not_wrap() -> None:
    assert tally(look(0, 0), look(WRAP - 1, 100)).utilization() is not None
    assert tally(look(0, 0), look(WRAP, 100), wraps=False).utilization() is not None
    assert tally(look(0, 900), look(WRAP, 100), wraps=False).utilization() is None


# The tracker of a card.


def test_a_meter_tells_each_core_apart_and_begins_anew_with_each_reading() -> None:
    def cores(zero: int, one: int | None) -> tuple[CoreReading, ...]:
        found = [CoreReading(core=0, cycles=zero * 2, task_cycles=zero, source=SINGLE)]
        if one is not None:
            source = CoreRange(1, 1)
            found.append(CoreReading(core=1, cycles=one * 4, task_cycles=one, source=source))
        return tuple(found)

    tracker = UtilizationTracker(wraps=True)
    assert [core.utilization for core in tracker.measured(cores(1, 1), 0.0)] == [None, None]
    tracker.add(cores(2, 2), 1.0)
    told = tracker.measured(cores(3, 3), 2.0)
    assert [core.utilization for core in told] == [50, 25]
    assert [(core.cycles, core.task_cycles) for core in told] == [(6, 3), (12, 3)]
    # A core that is not told of for a while is not counted across that time.
    assert [core.utilization for core in tracker.measured(cores(4, None), 3.0)] == [50]
    assert [core.utilization for core in tracker.measured(cores(5, 4), 4.0)] == [50, None]
    assert tracker.measured((), 5.0) == ()


@given(st.lists(st.floats(0.05, LONGEST_PAUSE), min_size=1, max_size=50))
def test_no_more_than_the_longest_pause_is_between_two_looks(pauses: list[float]) -> None:
    tracker, now, at = UtilizationTracker(wraps=True), 100.0, 100.0
    tracker.add((look(1, 1),), now)
    for pause in pauses:
        if tracker.due(now, pause):
            tracker.add((look(1, 1),), now)
            at = now
        now += pause
        assert now - at <= LONGEST_PAUSE + 1e-9


def test_counters_that_do_not_wrap_are_never_due() -> None:
    tracker = UtilizationTracker(wraps=False)
    tracker.add((look(1, 1),), 0.0)
    assert not tracker.due(100.0, 100.0)


def test_a_core_is_as_busy_as_it_was_while_its_card_has_not_counted_on() -> None:
    """As it is read every half second with health.maxTemperature, and counts every second."""
    tracker = UtilizationTracker(wraps=False)

    def reading(cycles: int | None, now: float) -> float | None:
        task = None if cycles is None else cycles // 4
        sample = CoreReading(core=0, cycles=cycles, task_cycles=task, source=CoreRange(0, 0))
        return tracker.measured((sample,), now, held=3.0)[0].utilization

    assert [reading(4000, 0.0), reading(8000, 1.0)] == [None, 25]
    assert [reading(8000, 1.5), reading(8000, 2.0), reading(8000, 4.0)] == [25, 25, 25]
    assert reading(8000, 4.5) is None  # a clock that stands still
    assert reading(12000, 5.0) == 25
    assert reading(None, 5.5) is None  # it cannot be read, and is another core's for all we know
    assert reading(12000, 6.0) is None
