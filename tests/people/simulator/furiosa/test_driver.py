from dataclasses import replace
from random import Random

import pytest

from npu_agent.people.simulator import card
from npu_agent.people.simulator.furiosa.driver import core, files
from npu_agent.people.simulator.telemetry import (
    CardTelemetry,
    Workload,
    advance,
    fresh,
    with_workload,
)

WARBOY, RNGD = card("warboy", 0), card("rngd", 1)


def registers(text: object) -> dict[str, int]:
    assert isinstance(text, str)
    pairs = (line.split(": ") for line in text.splitlines())
    return {name: int(value, 16) for name, value in pairs}


@pytest.mark.parametrize(("workload", "pe"), [("single", "0"), ("busy", "0-1")])
def test_utilisation_from_perf_regs_is_the_load_over_a_wrap_of_the_counters(
    workload: Workload, pe: str
) -> None:
    before = with_workload(fresh("warboy"), workload)
    # Just below the end of what 32 bits hold, so that both counters wrap within the second.
    before = replace(before, cycles=((5 << 32) - 9,) * 2, task_cycles=((1 << 32) - 9,) * 2)
    after = advance(before, 1.0, Random(1))

    def read(state: CardTelemetry) -> dict[str, int]:
        return registers(files(WARBOY, state)[f"{core(WARBOY, pe)}/perf_regs"])

    old, new = read(before), read(after)
    assert max(*old.values(), *new.values()) < 1 << 32
    assert new["TaskExecutionTime"] < old["TaskExecutionTime"]
    assert new["CycleCountHigh"] == old["CycleCountHigh"] + 1
    worked = (new["TaskExecutionTime"] - old["TaskExecutionTime"]) % (1 << 32)
    passed = sum(
        sign * (value["CycleCountHigh"] << 32 | value["CycleCount"])
        for sign, value in ((1, new), (-1, old))
    )
    load = after.mean_load if pe == "0-1" else after.load[int(pe)]
    assert worked / passed == pytest.approx(load, abs=1e-6)
