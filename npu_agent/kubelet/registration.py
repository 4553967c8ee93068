"""The registration of a resource or a DRA driver at the kubelet."""

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

    def becomes(self, phase: SessionPhase, reason: str = "") -> None:
        self._publish(phase, reason, self.status.value.registrations)

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
        """`times` counts the registrations so far."""
        self._reporter.works()
        self._publish(SessionPhase.REGISTERED, "", times)

    def _publish(self, phase: SessionPhase, reason: str, registrations: int) -> None:
        now = self.status.value
        self.status.publish(
            replace(
                now,
                phase=phase,
                reason=reason,
                registrations=registrations,
                since=now.since if phase is now.phase else time.monotonic(),
            )
        )
