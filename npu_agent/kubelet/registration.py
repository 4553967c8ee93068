"""The state of one resource's, or one driver's, registration with the kubelet, for people."""

from __future__ import annotations

import time
from dataclasses import replace

from npu_agent.core.state import SessionPhase, SessionStatus
from npu_agent.feed import Feed
from npu_agent.logs import Reporter, logger

log = logger(__name__)


class RegistrationTracker:
    """The `status` of what is registered at the kubelet."""

    def __init__(self, resource: str) -> None:
        self.status: Feed[SessionStatus] = Feed(
            SessionStatus(resource=resource, phase=SessionPhase.NO_CARDS)
        )
        self._reporter = Reporter(log, "not registered; retrying", resource=resource)

    def becomes(self, phase: SessionPhase, reason: str = "", times: int | None = None) -> None:
        """`times` counts the registrations so far; None: as many as before."""
        now = self.status.value
        self.status.publish(
            replace(
                now,
                phase=phase,
                reason=reason,
                registrations=now.registrations if times is None else times,
                since=now.since if phase is now.phase else time.monotonic(),
            )
        )

    def waits_for(self, owner: str | None) -> None:
        """`owner` serves the node; None: it is ours now."""
        if owner is None:
            self.becomes(SessionPhase.REGISTERING)
        else:
            self.becomes(SessionPhase.STANDBY, f"served by {owner}")

    def fails(self, reason: str, phase: SessionPhase = SessionPhase.BLOCKED) -> None:
        """Something keeps it from being served; logged once."""
        self.becomes(phase, reason)
        self._reporter.failed(reason)

    def registered(self, times: int) -> None:
        self._reporter.works()
        self.becomes(SessionPhase.REGISTERED, times=times)
