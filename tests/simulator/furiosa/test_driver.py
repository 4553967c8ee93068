from dataclasses import replace
from random import Random

import pytest

from npu_agent.simulator import CardTelemetry, advance, card, fresh
from npu_agent.simulator.furiosa.driver import core, files, hwmon, management, nodes
from npu_agent.simulator.telemetry import Workload, with_workload

WARBOY, RNGD = card("warboy", 0), card("rngd", 1)


def registers(text: object) -> dict[str, int]:
    assert isinstance(text, str)
    pairs = (line.split(": ") for line in text.splitlines())
    return {name: int(value, 16) for name, value in pairs}


def test_nodes_of_a_warboy() -> None:
    assert sorted(nodes(WARBOY)) == [
        "dev/npu0",
        "dev/npu0_mgmt",
        "dev/npu0ch0",
        "dev/npu0ch1",
        "dev/npu0ch2",
        "dev/npu0ch3",
        "dev/npu0pe0",
        "dev/npu0pe0-1",
        "dev/npu0pe1",
    ]


def test_nodes_of_an_rngd() -> None:
    found = nodes(RNGD)

    assert len(found) == 35
    assert all(path.startswith("dev/rngd/npu1") for path in found)
    assert "dev/rngd/npu1" not in found
    assert "dev/rngd/npu1pe0-7" not in found
    assert {"dev/rngd/npu1mgmt", "dev/rngd/npu1ch7r", "dev/rngd/npu1pe4-7"} <= found


def test_sensors_are_in_the_units_of_hwmon() -> None:
    state = replace(fresh("warboy"), load=(0.5, 0.7), temperature=(51.25, 60.5))
    seen = files(WARBOY, state)

    def value(name: str) -> int:
        return int(str(seen[f"{hwmon(WARBOY)}/{name}"]))

    assert value("temp1_input") == 60500
    assert value("temp2_input") == 51250
    assert value("power1_average") == pytest.approx(state.watts * 1e6, abs=1)
    watts = value("curr1_input") / 1e3 * value("in0_input") / 1e3
    assert watts == pytest.approx(value("power1_average") / 1e6, abs=0.02)


def test_rngd_sensors_have_labels_and_the_peak_is_the_hottest_core() -> None:
    state = replace(fresh("rngd"), temperature=(41.0, 42.0, 43.0, 59.0, 45.0, 46.0, 47.0, 48.0))
    seen = files(RNGD, state)
    labels = [seen[f"{hwmon(RNGD)}/temp{n}_label"] for n in range(1, 11)]

    assert labels == ["PEAK\n", *(f"NPU_PE{n}\n" for n in range(8)), "AMBIENT\n"]
    assert seen[f"{hwmon(RNGD)}/temp1_input"] == "59000\n"  # PEAK
    assert seen[f"{hwmon(RNGD)}/temp5_input"] == "59000\n"  # NPU_PE3


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


def test_rngd_memory_occupancy_and_cycles_match_the_load() -> None:
    idle = replace(fresh("rngd"), load=(0.0, 0.3, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0))
    seen = files(RNGD, idle)

    def status(pe: int) -> object:
        return seen[f"{core(RNGD, str(pe))}/alloc_status"]

    assert seen[f"{management(RNGD)}/pe_occupancy"] == "0\n1\n1\n0\n0\n0\n0\n0\n"
    assert status(0) == ""
    little, much = registers(status(1)), registers(status(2))
    assert little["dram_capacity"] == much["dram_capacity"] == 6 * 1024**3
    assert 0 < little["dram_usage"] < much["dram_usage"] < much["dram_capacity"]

    busy = with_workload(fresh("rngd"), "busy")
    later = advance(busy, 10.0, Random(1))
    path = f"{core(RNGD, '5')}/metrics"
    old, new = registers(files(RNGD, busy)[path]), registers(files(RNGD, later)[path])
    share = (new["TaskCycleCount"] - old["TaskCycleCount"]) / (
        new["CycleCount"] - old["CycleCount"]
    )
    assert share == pytest.approx(later.load[5], abs=1e-6)
