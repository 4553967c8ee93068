"""How busy cores are: from what the driver counts to per cent. Pure.

Two reads of a core's counters tell how many cycles passed, and in how many of those a task ran.
Some cards count the latter in 32 bits, 4.3 s of full load at 1 GHz: so counters are also read
between two readings, and a reading has the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from npu_agent.core.hardware import CoreReading

if TYPE_CHECKING:
    from collections.abc import Collection

_WRAP = 1 << 32

LONGEST_PAUSE = 2.0
"""Seconds between two reads of counters of 32 bits: up to 2.1 GHz they cannot have come round."""


def interval(before: CoreReading, after: CoreReading, *, wraps: bool) -> tuple[int, int] | None:
    """``(cycles, task cycles)`` between two samples of one core, the latter not above the former.

    None where that cannot be known: a sample has no counters, or another entry's, the device was
    reset, or it is too long ago. `wraps`: task cycles are counted in 32 bits.
    """
    if before.source != after.source:
        return None
    if before.cycles is None or before.task_cycles is None:
        return None
    if after.cycles is None or after.task_cycles is None:
        return None
    passed = after.cycles - before.cycles
    worked = after.task_cycles - before.task_cycles
    if passed < 0 or (wraps and passed >= _WRAP):
        return None
    if worked < 0:
        worked += _WRAP if wraps else 0
        # A counter that came round has counted no more than there was time for. The two are read
        # one after the other, hence a little more than that.
        if not 0 <= worked <= passed + passed // 64:
            return None
    return passed, min(worked, passed)


@dataclass(frozen=True, slots=True)
class Tally:
    """The work of one core since the last reading."""

    last: CoreReading | None = None
    cycles: int = 0
    task_cycles: int = 0
    free: bool = False
    """Whether any sample had it not in use."""

    def add(self, sample: CoreReading, *, wraps: bool) -> Tally:
        """Adds a sample; its `utilization` is 0 where the core is not in use, else None."""
        between = interval(self.last, sample, wraps=wraps) if self.last else None
        cycles, task_cycles = between or (0, 0)
        return Tally(
            last=sample,
            cycles=self.cycles + cycles,
            task_cycles=self.task_cycles + task_cycles,
            free=self.free or sample.utilization == 0,
        )

    def renewed(self) -> Tally:
        return Tally(last=self.last, free=self.last is not None and self.last.utilization == 0)

    def utilization(self) -> float | None:
        """Per cent of the cycles that were counted.

        Without any: 0 if it was not in use at some sample, else None: 0 of 0 is not a ratio.
        """
        if self.cycles:
            return 100 * self.task_cycles / self.cycles
        return 0.0 if self.free else None


class UtilizationTracker:
    """Follows the cores of one card from reading to reading. Times are of `time.monotonic`."""

    def __init__(self, *, wraps: bool) -> None:
        self.wraps = wraps
        self._tallies: dict[int, Tally] = {}
        self._counted: dict[int, tuple[float, float]] = {}
        """How busy each core was when its cycles had last passed, and when."""
        self.read_at = 0.0
        """When the counters were read last."""

    def due(self, now: float, pause: float, longest: float = LONGEST_PAUSE) -> bool:
        """Whether counters have to be read now, as `pause` seconds later may be too late."""
        return self.wraps and now + pause > self.read_at + longest

    def add(self, samples: Collection[CoreReading], now: float) -> None:
        self.read_at = now
        # A core of which nothing is known this time begins again.
        self._tallies = {
            sample.core: self._tallies.get(sample.core, Tally()).add(sample, wraps=self.wraps)
            for sample in samples
        }

    def measured(
        self, samples: tuple[CoreReading, ...], now: float, *, held: float = 0.0
    ) -> tuple[CoreReading, ...]:
        """The cores of a reading, with their utilization since the one before.

        For `held` seconds a core keeps its value while its counters stay the same: a card may count
        less often than it is read, which health.maxTemperature makes every half second.
        """
        self.add(samples, now)
        cores = []
        before = self._counted
        self._counted = {}

        for sample in samples:
            tally = self._tallies[sample.core]
            utilization = tally.utilization()
            if sample.cycles is not None and sample.utilization is None:
                if utilization is not None:
                    self._counted[sample.core] = utilization, now
                elif sample.core in before:
                    busy, at = before[sample.core]
                    if now - at <= held:
                        utilization = busy
                        self._counted[sample.core] = busy, at
            cores.append(replace(sample, utilization=utilization))
        self._tallies = {core: tally.renewed() for core, tally in self._tallies.items()}
        return tuple(cores)
