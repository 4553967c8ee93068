"""The last minutes of each card's readings, for the status page's curves."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from npu_agent.core.hardware import CardState, Reading, Snapshot
from npu_agent.feed import Feed

SPAN = 300.0
"""Seconds that are remembered."""
_STEP = 4.9
"""Seconds between two points; readings that come faster share one. A little below the default
interval of 5 s between readings, so that each of those is a point."""
_MOST = int(SPAN / _STEP) + 1


@dataclass(frozen=True, slots=True)
class Point:
    """What the curves need of one reading; NaN where the driver does not report it."""

    at: float
    """`time.monotonic`."""
    temperature: float
    """°C, the hottest sensor; of readings that share a point, the highest."""
    power: float
    """W, the total."""
    load: float
    """Per cent, the mean of the cores."""

    @classmethod
    def of(cls, reading: Reading) -> Point:
        """What a reading says of it."""
        loads = [core.utilization for core in reading.cores]
        known = [load for load in loads if load is not None and math.isfinite(load)]
        return cls(
            at=reading.at,
            temperature=_or_nan(reading.temperature()),
            power=_or_nan(reading.power()),
            load=sum(known) / len(known) if known else math.nan,
        )


class History:
    """Remembers readings while it runs; a card that is gone is forgotten.

    Bounded: at most 62 points a card.
    """

    def __init__(self, snapshots: Feed[Snapshot]) -> None:
        """Follows `snapshots` once it runs."""
        self._snapshots = snapshots
        self._points: dict[str, deque[Point]] = {}

    async def run(self) -> None:
        """Remembers until cancelled."""
        async for snapshot in self._snapshots.watch():
            self.add(snapshot)

    def of(self, card_id: str) -> tuple[Point, ...]:
        """The card's points, oldest first; none for a card that is not there."""
        return tuple(self._points.get(card_id, ()))

    def add(self, snapshot: Snapshot) -> None:
        """Adds what is new in `snapshot`, and forgets the cards that are not in it."""
        self._points = {
            state.id: self._points.get(state.id) or deque(maxlen=_MOST) for state in snapshot.cards
        }
        for state in snapshot.cards:
            _note(self._points[state.id], state)


def _note(points: deque[Point], state: CardState) -> None:
    reading = state.reading
    if reading is None or (points and points[-1].at >= reading.at):
        return
    while points and points[0].at < reading.at - SPAN:
        points.popleft()
    before = points[-2].at if len(points) > 1 else -math.inf
    point = Point.of(reading)
    # The last point is open until it is a step away from the one before it.
    if points and reading.at - before < _STEP:
        last = points.pop()
        hottest = max(point.temperature, last.temperature, key=lambda t: (not math.isnan(t), t))
        point = replace(point, temperature=hottest)
    points.append(point)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
