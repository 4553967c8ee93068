"""What is declared to come from files of unknown format is what comes from them, and no more."""

from dataclasses import fields
from pathlib import Path

import pytest

from npu_agent.core.hardware import CoreReading, Reading
from npu_agent.core.vendor import MetricSource
from npu_agent.people import simulator
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.family import Unproven
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.inventory.helpers import tree, write

FIELDS = {
    MetricSource.FREQUENCY: {"frequency"},
    MetricSource.UTILIZATION: {"source"},  # whose cycles it is computed from, reading by reading
    MetricSource.CYCLES: {"cycles"},
    MetricSource.TASK_CYCLES: {"task_cycles"},
    MetricSource.DRAM_TOTAL: {"dram_total"},
    MetricSource.DRAM_USED: {"dram_used"},
}
"""Of a core's reading."""


def changed(before: CoreReading | Reading, after: CoreReading | Reading) -> set[str]:
    names = {field.name for field in fields(before)}
    return {name for name in names if getattr(before, name) != getattr(after, name)}


@pytest.mark.parametrize("unproven", FAMILIES["rngd"].unproven, ids=lambda one: one.file)
def test_without_the_file_a_core_in_use_lacks_what_is_declared(
    tmp_path: Path, unproven: Unproven
) -> None:
    root = tree(tmp_path / "host", "rngd=1")
    simulator.apply_fault(root, "npu0", "busy")
    host = Furiosa(root)
    [entry] = host.scan()
    card = host.identify(entry)
    before = host.read(entry, card)
    files = list((root / "sys/devices/virtual/rngd_mgmt").glob(f"*/{unproven.file}"))
    assert files
    for file in files:
        write(file, b"\xff what nobody expects\n")
    after = host.read(entry, card)
    expected = set().union(*(FIELDS[quantity] for quantity in unproven.quantities))
    for one, other in zip(before.cores, after.cores, strict=True):
        assert changed(one, other) == expected
    assert changed(before, after) <= {"at", "cores"}
