"""The families of cards the agent knows: a value each, and a line in the table at the end."""

from __future__ import annotations

import re

from npu_agent.core.hardware import CoreRange
from npu_agent.core.vendor import MetricSource
from npu_agent.vendors.furiosa import parse
from npu_agent.vendors.furiosa.family import Family, Unproven


def _warboy_product(device_type: str, soc_rev: str | None) -> str | None:
    """``Warboy`` of revision B0 is sold as ``warboyB0``."""
    if device_type.lower() != "warboy":
        return None
    return "warboyB0" if soc_rev and soc_rev.upper() == "B0" else "warboy"


def _warboy_frequencies(raw: bytes | None) -> tuple[int | None, ...]:
    """Both cores run at one clock; the one of the tensor unit is what a Warboy is known by."""
    clock = dict(parse.numbers(raw)).get("ne tensor (MHz)")
    return () if clock is None else (clock, clock)


WARBOY = Family(
    name="warboy",
    title="FuriosaAI Warboy",
    core_count=2,
    memory_gib=16,  # LPDDR4X
    class_dir="npu_mgmt",
    entry=re.compile(r"npu([0-9]{1,4})_mgmt"),
    product=_warboy_product,
    liveness_file="alive",
    dev_dir="",
    shared_nodes=("npu{n}_mgmt", *(f"npu{{n}}ch{channel}" for channel in range(4))),
    whole_nodes=("npu{n}",),
    core_ranges=(CoreRange(0, 0), CoreRange(1, 1), CoreRange(0, 1)),
    core_entry="npu{n}pe",
    counters_file="perf_regs",
    counters=parse.perf_regs,
    counts_in_use_only=True,
    frequencies=_warboy_frequencies,
)
"""PCI 1ed2:0000, 2 cores, nodes directly in /dev."""

RNGD = Family(
    name="rngd",
    title="FuriosaAI RNGD",
    core_count=8,
    memory_gib=48,  # HBM3
    class_dir="rngd_mgmt",
    # "!" is how the kernel writes a "/" of a device's name; some drivers put a "_" before mgmt.
    entry=re.compile(r"rngd!npu([0-9]{1,4})_?mgmt"),
    product=lambda device_type, _: "rngd" if device_type.lower() == "rngd" else None,
    kin=re.compile("rngd(.*[a-z0-9+].*)", re.IGNORECASE),
    liveness_file="device_state",
    dev_dir="rngd/",
    shared_nodes=(
        "npu{n}mgmt",
        *(f"npu{{n}}bar{bar}" for bar in (0, 2, 4)),
        *(f"npu{{n}}ch{channel}" for channel in range(8)),
        *(f"npu{{n}}ch{channel}r" for channel in range(8)),
        "npu{n}dmar",
    ),
    # As programs for RNGD write it. Ray counts the items, so two halves would be two cards.
    whole_environment=(("FURIOSA_DEVICES", "npu:{n}"),),
    # For transfers between cards; what it is called is not public.
    optional_nodes=("npu{n}p2pmem", "npu{n}_p2pmem"),
    whole_nodes=(),
    core_ranges=tuple(
        CoreRange(first, first + width - 1) for width in (1, 2, 4) for first in range(0, 8, width)
    ),
    core_entry="rngd!npu{n}pe",
    counters_file="metrics",
    counters=parse.metrics,
    counts_in_use_only=False,
    frequencies=lambda raw: parse.per_core(raw, 8),
    sensor_label=str.lower,  # as the vendor's exporter of 2025 has them
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
"""PCI 1ed2:0001, 8 cores. There is no node for all 8: a whole card is pe0-3 and pe4-7."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        WARBOY,
        RNGD,
    )
}
"""In the order in which they are searched."""
