"""The health of a card: a pure state machine, probes in, state out.

It takes several bad probes in a row to fence a card and several good ones to bring it back. What
the driver does not say is unknown, and never fences.

How a probe counts for the streak of bad or good probes depends on the last word of the driver,
which says 1 (the card works) or 0, or has no file for it:

| this probe               | after a 1, or without a word | after a 0 |
|--------------------------|------------------------------|-----------|
| 1                        | good                         | good      |
| the driver does not say  | good                         | ignored   |
| 0, or any other fault    | bad                          | bad       |

So a card without such a file, fenced for a missing node or a hung read, recovers without help.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from npu_agent.core.hardware import Cause, Health, HealthState

_COOL_DOWN = 5.0
"""°C below health.maxTemperature at which a card that was too hot is good again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one probe of a card."""

    state: HealthState
    """Unhealthy: the probe found a fault. Unknown: it found none, and the driver does not say."""
    reason: str
    """For people."""
    cause: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The probes in a row that change the state, and what counts as hot or slow."""

    failures: int = 2
    recoveries: int = 3
    max_temperature: float | None = None
    """°C; None: temperature does not count."""
    slow_after: float = 300.0
    """Seconds for which a card has to be slow; 0: cards are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTracker:
    """The health of a card, and recent probes that contradict it."""

    health: Health
    streak: int = 0
    """Probes in a row that contradict the present state."""
    dead: bool = False
    """Whether the driver's last word was that the card does not work."""
    hot: bool = False
    """Whether the card is fenced, and was too hot at some probe since then."""


def begin(verdict: Verdict, now: float) -> HealthTracker:
    """The tracker after the first probe, which decides alone.

    A card that is dead at the agent's start is never offered.
    """
    health = Health(state=verdict.state, reason=verdict.reason, since=now, cause=verdict.cause)
    return HealthTracker(
        health=health, dead=verdict.cause is Cause.DEAD, hot=verdict.cause is Cause.HOT
    )


def with_heat(
    verdict: Verdict, temperature: float | None, tracker: HealthTracker | None, policy: Policy
) -> Verdict:
    """The verdict, or unhealthy if the card is too hot: `temperature` is in °C; None: unknown.

    A card that was fenced for heat has to cool to some degrees below the limit: else it would flap.
    """
    limit = policy.max_temperature
    if limit is None or temperature is None or verdict.state is HealthState.UNHEALTHY:
        return verdict
    if tracker is not None and tracker.hot:
        limit -= _COOL_DOWN
    if temperature <= limit:
        return verdict
    reason = f"{temperature:g} °C, above {limit:g} °C"
    return Verdict(HealthState.UNHEALTHY, reason, Cause.HOT)


def step(tracker: HealthTracker, verdict: Verdict, policy: Policy, now: float) -> HealthTracker:
    """The tracker after one more probe at `now` (seconds of `time.monotonic`)."""
    fenced = tracker.health.state is HealthState.UNHEALTHY
    bad = verdict.state is HealthState.UNHEALTHY
    # Only a healthy answer takes back that the driver has called the card dead.
    dead = verdict.cause is Cause.DEAD or (
        tracker.dead and verdict.state is not HealthState.HEALTHY
    )
    if verdict.state is HealthState.UNKNOWN and dead:
        streak = tracker.streak
    elif bad == fenced:
        streak = 0
    else:
        streak = tracker.streak + 1
        if streak >= (policy.recoveries if fenced else policy.failures):
            return replace(begin(verdict, now), dead=dead)
    hot = fenced and (tracker.hot or verdict.cause is Cause.HOT)
    tracker = replace(tracker, streak=streak, dead=dead, hot=hot)
    if fenced or bad or verdict.state is tracker.health.state:
        return tracker
    # Of the two states that are not fenced, the latest probe decides.
    return replace(tracker, health=begin(verdict, now).health)
