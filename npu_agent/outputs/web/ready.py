"""Whether the agent does its job, and if not, why: the readiness probe. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from npu_agent.config.poller import State
from npu_agent.core.hardware import Snapshot
from npu_agent.core.offer import advertise
from npu_agent.outputs.deviceplugin.publisher import Wanted
from npu_agent.outputs.deviceplugin.session import Phase, Status


def reasons(
    *, snapshot: Snapshot, wanted: Wanted, sessions: Iterable[Status], config: State
) -> tuple[str, ...]:
    """What keeps the agent from being ready, for people; empty when nothing does.

    It is ready when the kubelet holds every resource that has cards open, or when another instance
    of the agent serves it (a rolling update with maxSurge waits for the new one to be ready before
    it ends the old one), and when the config file that is there is the one in force. Keys that
    wait for a restart are no reason: nothing but a restart would help, and that is the user's.
    """
    found = [_of(session, snapshot, wanted) for session in sessions]
    if config.error is not None:
        found.append(f"config: {config.error}")
    return tuple(filter(None, found))


def _of(session: Status, snapshot: Snapshot, wanted: Wanted) -> str | None:
    """Why this resource is not served as it should be; None if it is."""
    why = f": {session.reason}" if session.reason else ""
    match session.phase:
        case Phase.REGISTERED | Phase.STANDBY:
            return None
        case Phase.BLOCKED | Phase.ENDED:
            return f"{session.resource}: {session.phase.value}{why}"
        case Phase.NO_CARDS | Phase.REGISTERING if not snapshot.complete:
            return f"{session.resource}: registering: still looking for cards"
        case Phase.NO_CARDS | Phase.REGISTERING if not _has_cards(session, snapshot, wanted):
            return None
    again = " again" if session.registrations else ""
    return f"{session.resource}: registering{again}{why}"


def _has_cards(session: Status, snapshot: Snapshot, wanted: Wanted) -> bool:
    """Asked of the hardware: a session is told of its cards a moment after they were found."""
    return any(
        advertise(snapshot, resource, wanted.disabled)
        for resource in wanted.resources
        if resource.name == session.resource
    )
