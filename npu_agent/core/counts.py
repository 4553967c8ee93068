"""Counters for /metrics: plain numbers, no I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

RESULTS = ("granted", "invalid", "unknown", "unhealthy", "failed")
"""How an Allocate can end; failed: without an answer, by a fault or a caller that went away."""

PREPARES = ("prepared", "refused", "failed")

_ALLOCATION = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)
_PREPARE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0, 40.0)


class Histogram:
    """Counts numbers by the bounds they fall between."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` are sorted upper bounds, each included; what is above the last counts too."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, number: float) -> None:
        self.counts[bisect_left(self.bounds, number)] += 1
        self.total += number


@dataclass(slots=True)
class Counts:
    """Counts of one resource, since the agent started."""

    messages: int = 0
    """Device lists sent to the kubelet."""
    allocations: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(RESULTS, 0)))
    """By how they ended, one of `RESULTS`."""
    allocation_seconds: Histogram = field(default_factory=lambda: Histogram(_ALLOCATION))
    """Seconds from an Allocate call to its answer."""
    preferred: Counter[str] = field(default_factory=Counter)
    returns: int = 0
    """Times that the registration was lost and made again."""

    def allocated(self, result: str, seconds: float) -> None:
        self.allocations[result] += 1
        self.allocation_seconds.add(seconds)


@dataclass(slots=True)
class DraCounts:
    """Counts of one DRA driver, since the agent started."""

    prepares: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(PREPARES, 0)))
    prepare_seconds: Histogram = field(default_factory=lambda: Histogram(_PREPARE))
    unprepares: Counter[str] = field(default_factory=lambda: Counter({"unprepared": 0}))

    def prepared(self, result: str, seconds: float) -> None:
        self.prepares[result] += 1
        self.prepare_seconds.add(seconds)
