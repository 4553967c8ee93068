"""The last hour of each card's readings, for the status page's curves."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from npu_agent.core.hardware import Reading, Snapshot
from npu_agent.feed import Feed

SPAN = 3600
"""Seconds that are remembered."""
STEP = 30
"""Seconds that share a point."""
MOST = SPAN // STEP
"""Points of a card."""


def step_of(at: float) -> int:
    """The number of the step that a time falls into; `at` as `Reading.at`."""
    return int(at // STEP)


@dataclass(frozen=True, slots=True)
class Figures:
    """What the page shows large of one reading; NaN where the driver does not report it."""

    temperature: float = math.nan
    """°C, the hottest sensor."""
    power: float = math.nan
    """W, the total."""
    load: float = math.nan
    """Per cent, the mean of the cores."""

    @classmethod
    def of(cls, reading: Reading | None) -> Figures:
        """What a reading says of it."""
        if reading is None:
            return cls()
        loads = [core.utilization for core in reading.cores]
        known = [load for load in loads if load is not None and math.isfinite(load)]
        return cls(
            temperature=_or_nan(reading.temperature()),
            power=_or_nan(reading.power()),
            load=sum(known) / len(known) if known else math.nan,
        )


@dataclass(slots=True)
class Track:
    """A card's points, oldest first: columns of equal length, at most `MOST` long.

    A point has the highest temperature of its step, so that a peak stays, and the means of power
    and load. Kept as arrays: an hour of 64 cards is 120 kB.
    """

    steps: array[int] = field(default_factory=lambda: array("i"))
    """The number of each point's step, rising; one is missing where nothing was read."""
    temperature: array[float] = field(default_factory=lambda: array("f"))
    power: array[float] = field(default_factory=lambda: array("f"))
    load: array[float] = field(default_factory=lambda: array("f"))
    _last: float = -math.inf
    """When the last reading was taken."""
    _shared: int = 0
    """Readings in the last point."""

    def add(self, reading: Reading) -> None:
        """Adds a reading unless it is there already."""
        if reading.at <= self._last:
            return
        self._last, step, now = reading.at, step_of(reading.at), Figures.of(reading)
        if not self.steps or self.steps[-1] != step:
            first = next((i for i, s in enumerate(self.steps) if s > step - MOST), len(self.steps))
            for column in (self.steps, self.temperature, self.power, self.load):
                del column[:first]
            self.steps.append(step)
            self.temperature.append(now.temperature)
            self.power.append(now.power)
            self.load.append(now.load)
            self._shared = 1
            return
        self._shared += 1
        hottest = max(self.temperature[-1], now.temperature, key=lambda t: (t == t, t))
        self.temperature[-1] = hottest
        for column, value in ((self.power, now.power), (self.load, now.load)):
            mean = column[-1]
            column[-1] = value if math.isnan(mean) else mean + (value - mean) / self._shared


NOTHING = Track()
"""Of a card without readings."""


class History:
    """Remembers readings while it runs; a card that is gone is forgotten."""

    def __init__(self, snapshots: Feed[Snapshot]) -> None:
        """Follows `snapshots` once it runs."""
        self._snapshots = snapshots
        self._tracks: dict[str, Track] = {}

    async def run(self) -> None:
        """Remembers until cancelled."""
        async for snapshot in self._snapshots.watch():
            self.add(snapshot)

    def of(self, card_id: str) -> Track:
        """The card's points; none for a card that is not there."""
        return self._tracks.get(card_id, NOTHING)

    def add(self, snapshot: Snapshot) -> None:
        """Adds what is new in `snapshot`, and forgets the cards that are not in it."""
        tracks = self._tracks
        self._tracks = {state.id: tracks.get(state.id) or Track() for state in snapshot.cards}
        for state in snapshot.cards:
            if state.reading is not None:
                self._tracks[state.id].add(state.reading)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
