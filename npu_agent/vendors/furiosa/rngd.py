"""RNGD (Renegade): PCI 1ed2:0001, 8 cores, nodes in /dev/rngd, management in /sys/class/rngd_mgmt.

There is no node for all 8 cores: a whole card is the two halves pe0-3 and pe4-7.
"""

from __future__ import annotations

import re

from npu_agent.core.hardware import CoreRange
from npu_agent.core.vendor_spec import MetricSource
from npu_agent.vendors.furiosa import parse
from npu_agent.vendors.furiosa.family import Family, Unproven

_CORES = 8


def product(device_type: str, soc_rev: str | None) -> str | None:  # noqa: ARG001 (one shape for all)
    return "rngd" if device_type.lower() == "rngd" else None


def frequencies(raw: bytes | None) -> tuple[int | None, ...]:
    return parse.per_core(raw, _CORES)


FAMILY = Family(
    name="rngd",
    title="FuriosaAI RNGD",
    core_count=_CORES,
    # HBM3.
    memory_gib=48,
    class_dir="rngd_mgmt",
    # "!" is how the kernel writes a "/" of a device's name; some drivers put a "_" before mgmt.
    entry=re.compile(r"rngd!npu([0-9]{1,4})_?mgmt"),
    product=product,
    liveness_file="device_state",
    dev_dir="rngd/",
    shared_nodes=(
        "npu{n}mgmt",
        *(f"npu{{n}}bar{bar}" for bar in (0, 2, 4)),
        *(f"npu{{n}}ch{channel}" for channel in range(8)),
        *(f"npu{{n}}ch{channel}r" for channel in range(8)),
        "npu{n}dmar",
    ),
    # For transfers between cards; what it is called is not public.
    optional_nodes=("npu{n}p2pmem", "npu{n}_p2pmem"),
    whole_nodes=(),
    core_ranges=tuple(
        CoreRange(first, first + width - 1)
        for width in (1, 2, 4)
        for first in range(0, _CORES, width)
    ),
    core_entry="rngd!npu{n}pe",
    counters_file="metrics",
    counters=parse.metrics,
    counts_in_use_only=False,
    frequencies=frequencies,
    # As the vendor's exporter of 2025 has them.
    sensor_label=str.lower,
    memory_file="alloc_status",
    memory=parse.alloc_status,
    limits=True,
    secondary_file="is_rngd_max_secondary",
    occupancy_file="pe_occupancy",
    unproven=(
        Unproven(
            file="npu_clocks",
            known="it has eight lines; `0` in each of them in the vendor's test data",
            guessed="a line is the clock of the core of that number, in MHz, "
            "with or without a name: `pe0 (MHz): 1000`",
            quantities=(MetricSource.FREQUENCY,),
        ),
        Unproven(
            file="metrics",
            known="it is there for each core, with `CycleCount` and `TaskCycleCount`, in hex",
            guessed="lines as in `perf_regs`: `CycleCount: 0x1a2b`; 64 bits; "
            "counted for free cores, too, and in the entries of fused cores",
            quantities=(MetricSource.UTILIZATION, MetricSource.CYCLES, MetricSource.TASK_CYCLES),
        ),
        Unproven(
            file="alloc_status",
            known="it is empty while the core is free, "
            "and else has lines `dram_capacity: 0x0` and `dram_usage: 0x0`",
            guessed="`dram_usage: 0x40000000` of memory in use is in bytes",
            quantities=(MetricSource.DRAM_TOTAL, MetricSource.DRAM_USED),
        ),
    ),
)
