"""The health of a card: a pure state machine, probes in, state out.

It takes several bad probes in a row to fence a card and several good ones to bring it back. What
the driver does not say is unknown, and never fences.

No answer counts as good, except after a 0: then only a 1 recovers the card, and no answer neither
recovers, nor fences, nor breaks a streak. A card that was fenced for a missing node or a hung read
has to recover without help, also if its driver has no such file.
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
    """Whether it is fenced, and has been too hot since."""


def begin(verdict: Verdict, now: float) -> HealthTracker:
    """The tracker after the first probe, which is believed.

    A card that is dead at the agent's start is never offered.
    """
    health = Health(state=verdict.state, reason=verdict.reason, since=now, cause=verdict.cause)
    return HealthTracker(
        health=health, dead=verdict.cause is Cause.DEAD, hot=verdict.cause is Cause.HOT
    )


def with_heat(
    verdict: Verdict, temperature: float | None, tracker: HealthTracker | None, policy: Policy
) -> Verdict:
    """The verdict in view of the card's temperature in °C; None: unknown.

    A card that was fenced for heat has to cool down by some degrees more, or it would come and go.
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
