"""How a card's readings move: pure functions from one moment to the next, no I/O.

What is shown belongs together because all of it comes from the load of the cores: temperature
follows it slowly, power without delay, cycle counters by the clock.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from npu_agent.people.simulator.families import FAMILIES, CardFamily

Workload = Literal["auto", "busy", "single", "idle"]

IDLE_CELSIUS = 40.0
BUSY_CELSIUS = 70.0
AMBIENT_CELSIUS = 31.0
BUSY_LOAD = 0.9

_WARMING_SECONDS = 20.0  # to 63 % of the way
_FRESH = 60.0  # seconds since the driver of a new card was loaded
_IDLE = 45.0  # seconds, in turns with busy ones
_BUSY = 80.0


@dataclass(frozen=True)
class CardTelemetry:
    """The telemetry of a card at one moment.

    Per core: `load` (0 to 1), `temperature` (°C), `cycles` and `task_cycles` since the driver was
    loaded. The workload `auto` is on what containers hold, or where that is not known alternates
    between idle and busy; `single` is work on the first core alone.
    """

    family: str
    load: tuple[float, ...]
    temperature: tuple[float, ...]
    cycles: tuple[int, ...]
    task_cycles: tuple[int, ...]
    uptime: float = _FRESH
    errors: int = 0
    ticks: int = 0
    workload: Workload = "auto"

    @property
    def traits(self) -> CardFamily:
        return FAMILIES[self.family]

    @property
    def mean_load(self) -> float:
        return sum(self.load) / len(self.load)

    @property
    def watts(self) -> float:
        idle = self.traits.idle_watts
        busy = self.traits.busy_watts
        return idle + (busy - idle) * self.mean_load


def fresh(family: str) -> CardTelemetry:
    """A card a minute after its driver was loaded: idle, 40 °C."""
    traits = FAMILIES[family]
    return CardTelemetry(
        family=family,
        load=(0.0,) * traits.cores,
        temperature=(IDLE_CELSIUS,) * traits.cores,
        cycles=(60 * traits.clock_mhz * 1_000_000,) * traits.cores,
        task_cycles=(0,) * traits.cores,
    )


def with_workload(state: CardTelemetry, workload: Workload) -> CardTelemetry:
    """The card with another workload; load is there immediately, heat follows as it is advanced."""
    state = replace(state, workload=workload)
    if workload == "auto":
        return state
    return replace(state, load=tuple(_load(workload, core, 0.0) for core in range(len(state.load))))


def reset(state: CardTelemetry) -> CardTelemetry:
    """The card after a reset of its device: its counters start again from 0."""
    none = (0,) * len(state.cycles)
    return replace(state, cycles=none, task_cycles=none, uptime=0.0)


def advance(
    state: CardTelemetry, dt: float, shift: float = 0.0, held: Collection[int] | None = None
) -> CardTelemetry:
    """The same card `dt` seconds later; its work begins `shift` seconds before that of others.

    With `held`, the cores that containers hold, the workload `auto` is on these, without turns.
    """
    at = state.uptime + dt + shift - _FRESH
    load = tuple(_load(state.workload, core, at, held) for core in range(len(state.load)))
    mean = sum(load) / len(load)
    elapsed = round(dt * state.traits.clock_mhz * 1_000_000)
    return replace(
        state,
        load=load,
        # A core is heated by its own work and by its neighbours'.
        temperature=tuple(
            _warmed(celsius, 0.4 * own + 0.6 * mean, dt)
            for celsius, own in zip(state.temperature, load, strict=True)
        ),
        cycles=tuple(count + elapsed for count in state.cycles),
        task_cycles=tuple(
            count + round(elapsed * x) for count, x in zip(state.task_cycles, load, strict=True)
        ),
        uptime=state.uptime + dt,
        ticks=state.ticks + 1,
    )


def _load(workload: Workload, core: int, at: float, held: Collection[int] | None = None) -> float:
    turn = at % (_IDLE + _BUSY) >= _IDLE
    in_use = turn if held is None else core in held
    works = {"auto": in_use, "busy": True, "single": core == 0, "idle": False}
    return BUSY_LOAD if works[workload] else 0.0


def _warmed(celsius: float, load: float, dt: float) -> float:
    settled = IDLE_CELSIUS + (BUSY_CELSIUS - IDLE_CELSIUS) * load
    return settled + (celsius - settled) * math.exp(-dt / _WARMING_SECONDS)
