"""The curves of the status page: the ends of an axis, and lines in a box. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from npu_agent.outputs.web.history import MOST as MOST_POINTS

STEP_WIDE = 4
WIDE, HIGH = STEP_WIDE * MOST_POINTS, 72
"""The box of a curve, and of a step of the history in it."""
_GAP = 12
"""Width without a reading from which on a curve is broken."""


def bounds(values: Iterable[float], least: float) -> tuple[float, float]:
    """The ends of an axis: round values, so that they seldom change.

    `values` are NaN where one is missing; `least` is the smallest range, so that noise stays small.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, least
    smallest, largest = min(finite), max(finite)
    rough = max(least, largest - smallest) / 2
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
    low = math.floor(smallest / step) * step
    return low, max(low + 2 * step, math.ceil(largest / step) * step)


def curve(
    points: Iterable[tuple[int, float]], ends: tuple[float, float]
) -> Sequence[Sequence[str]]:
    """The lines of a curve, each the points of a polyline, in a box of `WIDE` by `HIGH`.

    Args:
        points: horizontal positions, 0 to `WIDE`, and values: NaN where one is missing. There the
            curve is broken, and where positions are more than `_GAP` apart.
        ends: the values at the bottom and at the top: see `bounds`.
    """
    low, high = ends
    bottom, before = HIGH - 2, -WIDE
    lines: list[list[str]] = []
    for x, value in points:
        if low <= value <= high:  # not NaN
            if x - before > _GAP:
                lines.append([])
            before = x
            lines[-1].append(f"{x},{int(bottom - (value - low) * (bottom - 2) / (high - low))}")
    return lines
