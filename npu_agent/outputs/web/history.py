"""The last hour of each card's readings, for the status page's curves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from npu_agent.core.hardware import Reading, Snapshot
from npu_agent.feed import Feed

STEP = 60
"""Seconds that share a point."""
MOST = 60
"""Points of a card: an hour."""


def step_of(at: float) -> int:
    return int(at // STEP)


class Figures(NamedTuple):
    """The main figures of one reading; NaN where the driver does not report it."""

    temperature: float
    """°C, the hottest sensor."""
    power: float
    """W, the total."""
    load: float
    """Per cent, the mean of the cores."""

    @classmethod
    def of(cls, reading: Reading) -> Figures:
        loads = [core.utilization for core in reading.cores]
        measured = [load for load in loads if load is not None and math.isfinite(load)]
        temperature = reading.temperature()
        power = reading.power()
        return cls(
            temperature=math.nan if temperature is None else temperature,
            power=math.nan if power is None else power,
            load=sum(measured) / len(measured) if measured else math.nan,
        )


@dataclass(slots=True)
class Point:
    """The readings of a step: the highest temperature and means of the rest."""

    step: int
    figures: Figures
    at: float
    """When the last reading was taken."""
    readings: int = 1

    def add(self, at: float, now: Figures) -> None:
        self.at = at
        self.readings += 1
        temperatures = (self.figures.temperature, now.temperature)
        self.figures = Figures(
            max(temperatures, key=lambda value: (not math.isnan(value), value)),
            self._mean(self.figures.power, now.power),
            self._mean(self.figures.load, now.load),
        )

    def _mean(self, mean: float, value: float) -> float:
        return value if math.isnan(mean) else mean + (value - mean) / self.readings


Track = Sequence[Point]
"""Of a card, the oldest point first; steps without a reading are left out."""


class History:
    """Remembers readings while it runs; a card that is gone is forgotten."""

    def __init__(self, snapshots: Feed[Snapshot]) -> None:
        self._snapshots = snapshots
        self._tracks: dict[str, deque[Point]] = {}

    async def run(self) -> None:
        async for snapshot in self._snapshots.watch():
            self.add(snapshot)

    def of(self, card_id: str) -> Track:
        return self._tracks.get(card_id, ())

    def add(self, snapshot: Snapshot) -> None:
        self._tracks = {state.id: self._tracks.get(state.id, deque()) for state in snapshot.cards}
        for state in snapshot.cards:
            track = self._tracks[state.id]
            reading = state.reading
            if reading is None or (track and reading.at <= track[-1].at):
                continue

            step = step_of(reading.at)
            now = Figures.of(reading)
            if track and track[-1].step == step:
                track[-1].add(reading.at, now)
                continue
            track.append(Point(step, now, reading.at))
            while track[0].step <= step - MOST:
                track.popleft()
