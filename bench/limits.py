"""What it costs to read limits, reasons to throttle and errors, which newer drivers have."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.figure import Figure
from npu_agent.config import Config
from npu_agent.people import simulator
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.sysfs import Furiosa

_PASSES = 200


def limits() -> Figure:
    """As a part of a core, with eight cards that are all slow: their reasons have names to read."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        simulator.make(root, simulator.parse_cards("rngd=8"), plain_nodes=True)
        for card in simulator.cards(root):
            simulator.apply_fault(root, card.spec.name, "slow")
        without = {name: replace(family, limits=False) for name, family in FAMILIES.items()}
        seconds = _read(Furiosa(root)) - _read(Furiosa(root, without))
    used = f"{100 * seconds / Config().metrics.interval:.3f} %; {seconds * 1e3:.2f} ms"
    return Figure("limits and throttling of 8 RNGD: CPU; each time", used, "<= 0.1 %")


def _read(vendor: Furiosa) -> float:
    """The CPU time of a reading of all cards, in seconds; the median of many."""
    cards = [(entry, vendor.identify(entry)) for entry in vendor.scan()]
    taken = []
    for _ in range(_PASSES):
        before = time.process_time()
        for entry, card in cards:
            vendor.read(entry, card)
        taken.append(time.process_time() - before)
    return statistics.median(taken)
