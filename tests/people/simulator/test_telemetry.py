import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_agent.people.simulator.families import FAMILIES
from npu_agent.people.simulator.telemetry import (
    CardTelemetry,
    Workload,
    advance,
    fresh,
    with_workload,
)

each_family = pytest.mark.parametrize("family", FAMILIES)


def after(state: CardTelemetry, seconds: int) -> CardTelemetry:
    for _ in range(seconds):
        state = advance(state, 1.0)
    return state


@each_family
def test_a_busy_card_is_hot_and_takes_power_and_counts_task_cycles(family: str) -> None:
    idle = after(with_workload(fresh(family), "idle"), 300)
    busy = after(with_workload(fresh(family), "busy"), 300)
    traits = FAMILIES[family]

    assert idle.mean_load == 0.0
    assert busy.mean_load > 0.7
    assert max(idle.temperature) == pytest.approx(40, abs=1)
    assert 63 < max(busy.temperature) < 75
    assert idle.watts == traits.idle_watts
    assert 0.7 * traits.busy_watts < busy.watts <= traits.busy_watts
    assert busy.cycles == idle.cycles
    assert idle.task_cycles == (0,) * traits.cores
    for task, cycles in zip(busy.task_cycles, busy.cycles, strict=True):
        elapsed = cycles - fresh(family).cycles[0]
        assert elapsed == 300 * traits.clock_mhz * 1_000_000
        assert 0.7 * elapsed < task <= elapsed


@each_family
def test_auto_alternates_between_idle_and_busy(family: str) -> None:
    state, busy = fresh(family), set()
    for _ in range(600):
        state = advance(state, 1.0)
        busy.add(state.mean_load > 0.5)

    assert busy == {True, False}
    assert state.errors == 0


@each_family
def test_load_is_where_containers_are_and_nowhere_else(family: str) -> None:
    state, last = fresh(family), FAMILIES[family].cores - 1
    for _ in range(200):
        state = advance(state, 1.0, held={last})
        assert [core for core, load in enumerate(state.load) if load] == [last]
    assert advance(state, 1.0, held=()).mean_load == 0.0
    busy = with_workload(state, "busy")
    assert advance(busy, 1.0, held=()).mean_load > 0.5, "a person said so"


@settings(deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    workload=st.sampled_from(("auto", "busy", "single", "idle")),
    steps=st.lists(st.floats(0, 3600), min_size=1, max_size=30),
)
def test_readings_stay_within_bounds_and_counters_never_go_back(
    family: str, workload: Workload, steps: list[float]
) -> None:
    state = with_workload(fresh(family), workload)
    for dt in steps:
        before, state = state, advance(state, dt)
        assert all(0.0 <= load <= 1.0 for load in state.load)
        assert all(39.9 <= celsius <= 70.1 for celsius in state.temperature)
        traits = FAMILIES[family]
        assert traits.idle_watts <= state.watts <= traits.busy_watts
        assert state.uptime == before.uptime + dt
        assert state.errors == before.errors
        for core in range(traits.cores):
            passed = state.cycles[core] - before.cycles[core]
            worked = state.task_cycles[core] - before.task_cycles[core]
            assert 0 <= worked <= passed
