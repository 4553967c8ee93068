"""Warboy: PCI 1ed2:0000, 2 cores, nodes directly in /dev, management in /sys/class/npu_mgmt."""

from __future__ import annotations

import re

from npu_agent.core.hardware import CoreRange
from npu_agent.vendors.furiosa import parse
from npu_agent.vendors.furiosa.family import Family


def product(device_type: str, soc_rev: str | None) -> str | None:
    """``Warboy`` of revision B0 is sold as ``warboyB0``."""
    if device_type.lower() != "warboy":
        return None
    return "warboyB0" if soc_rev and soc_rev.upper() == "B0" else "warboy"


def frequencies(raw: bytes | None) -> tuple[int | None, ...]:
    """Both cores run at one clock; the one of the tensor unit is what a Warboy is known by."""
    clock = dict(parse.numbers(raw)).get("ne tensor (MHz)")
    return () if clock is None else (clock, clock)


FAMILY = Family(
    name="warboy",
    title="FuriosaAI Warboy",
    core_count=2,
    # LPDDR4X.
    memory_gib=16,
    class_dir="npu_mgmt",
    entry=re.compile(r"npu([0-9]{1,4})_mgmt"),
    product=product,
    liveness_file="alive",
    dev_dir="",
    shared_nodes=("npu{n}_mgmt", *(f"npu{{n}}ch{channel}" for channel in range(4))),
    whole_nodes=("npu{n}",),
    core_ranges=(CoreRange(0, 0), CoreRange(1, 1), CoreRange(0, 1)),
    core_entry="npu{n}pe",
    counters_file="perf_regs",
    counters=parse.perf_regs,
    counts_in_use_only=True,
    frequencies=frequencies,
)
