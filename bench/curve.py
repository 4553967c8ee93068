"""Samples over time: as a line of text, and whether they rise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations

BLOCKS = "▁▂▃▄▅▆▇█"
_MOST = 200
"""Points of which every two are compared; of more, one in so many is taken."""

Point = tuple[float, float]
"""When, in seconds, and how much."""


def drawn(points: Sequence[Point], width: int = 60) -> str:
    """The highest value of each stretch of time; the lowest of all is the lowest block."""
    begin, end, width = points[0][0], points[-1][0], min(width, len(points))
    highest: dict[int, float] = {}
    for at, value in points:
        place = min(int((at - begin) / (end - begin or 1) * width), width - 1)
        highest[place] = max(value, highest.get(place, value))
    low, high = min(highest.values()), max(highest.values())
    step = (high - low) / (len(BLOCKS) - 1) or 1
    return "".join(
        BLOCKS[round((highest[place] - low) / step)] if place in highest else " "
        for place in range(width)
    )


def risen(points: Sequence[Point]) -> float:
    """By how much the values rise from the first point to the last, but for what comes and goes.

    The median of the slopes between every two points (Theil-Sen), times the time between first and
    last: half of the points can be peaks without moving it much.
    """
    some = points[:: len(points) // _MOST + 1]
    slopes = [(b - a) / (after - at) for (at, a), (after, b) in combinations(some, 2)]
    return statistics.median(slopes or [0.0]) * (points[-1][0] - points[0][0])
