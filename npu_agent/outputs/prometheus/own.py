"""What /metrics says of the agent itself: its counts in, metric families out. Pure.

A series whose subject is not there (a resource that never had a card, a card without a reading) is
not there either: docs/metrics.md.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from npu_agent.config.poller import State as ConfigState
from npu_agent.core.hardware import Snapshot
from npu_agent.outputs.deviceplugin.counts import Counts, Histogram
from npu_agent.outputs.deviceplugin.session import Phase, Status
from npu_agent.outputs.prometheus.text import NONE, Definition, Labels, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What is told, as it stands at one moment. The counts may go on counting meanwhile."""

    version: str
    hostname: str
    """The Node's name."""
    now: float
    """`time.monotonic`: what the age of readings is measured against."""
    snapshot: Snapshot
    sessions: tuple[tuple[Status, Counts], ...]
    """One for each resource."""
    config: ConfigState
    restarts: Mapping[str, int]
    """How often each part failed and was started again."""
    lag: Histogram
    """Seconds that the loop was late."""
    labels_applied: Mapping[str, int] = field(default_factory=dict)
    """What was done to the Node's labels, by result."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Events on the Node, by result."""
    reading_failures: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    """Readings that failed, by family, card (``npu0``) and reason. Reasons are few."""
    page_failures: Mapping[str, int] = field(default_factory=dict)
    """`npu_agent.outputs.prometheus.page.Page.failures`."""


def families(own: Own) -> list[Metric]:
    """All families about the agent that have a sample, but for ``process_*``."""
    metrics = [definition.metric(own) for definition in DEFINITIONS]
    return [metric for metric in metrics if metric.samples]


def _build(own: Own) -> Samples:
    python = platform.python_version()
    yield Labels(version=own.version, python=python, hostname=own.hostname), 1


def _registered(own: Own) -> Samples:
    """1 only while the kubelet holds our stream open: what else is proof?"""
    for status, _ in own.sessions:
        if status.phase is not Phase.NO_CARDS:
            yield Labels(resource=status.resource), status.phase is Phase.REGISTERED


def _of_resource(value: Callable[[Counts], float]) -> Callable[[Own], Samples]:
    def samples(own: Own) -> Samples:
        for status, counts in own.sessions:
            yield Labels(resource=status.resource), value(counts)

    return samples


def _allocations(own: Own) -> Samples:
    for status, counts in own.sessions:
        for result, count in counts.allocations.items():
            yield Labels(resource=status.resource, result=result), count


def _allocation_seconds(own: Own) -> Iterable[tuple[Labels, Histogram]]:
    for status, counts in own.sessions:
        yield Labels(resource=status.resource), counts.allocation_seconds


def _preferred(own: Own) -> Samples:
    for status, counts in own.sessions:
        for reason, count in counts.preferred.items():
            yield Labels(resource=status.resource, reason=reason), count


def _kubelet_restarts(own: Own) -> Samples:
    # Every resource has a stream of its own and loses it when the kubelet restarts: one restart.
    yield NONE, max((counts.returns for _, counts in own.sessions), default=0)


def _ages(own: Own) -> Samples:
    for state in own.snapshot.cards:
        if state.reading:
            labels = Labels(arch=state.card.family, device=state.card.name)
            yield labels, round(max(0.0, own.now - state.reading.at), 3)


def _reading_failures(own: Own) -> Samples:
    for (family, card, reason), count in own.reading_failures.items():
        yield Labels(arch=family, device=card, reason=reason), count


def _by(label: str, counts: Callable[[Own], Mapping[str, int]]) -> Callable[[Own], Samples]:
    def samples(own: Own) -> Samples:
        for value, count in counts(own).items():
            yield Labels(**{label: value}), count

    return samples


def _one(value: Callable[[Own], float]) -> Callable[[Own], Samples]:
    return lambda own: [(NONE, value(own))]


DEFINITIONS: tuple[Definition[Own], ...] = (
    Definition(
        name="npu_agent_build_info",
        help="The version of npu-agent and of Python, and the Node, in the labels; always 1.",
        samples=_build,
    ),
    Definition(
        name="npu_agent_registered",
        help="Whether the kubelet holds the resource's stream open: 1 or 0.",
        samples=_registered,
    ),
    Definition(
        name="npu_agent_list_and_watch_messages_total",
        kind="counter",
        help="Device lists sent to the kubelet.",
        samples=_of_resource(lambda counts: counts.messages),
    ),
    Definition(
        name="npu_agent_allocations_total",
        kind="counter",
        help="Allocate calls of the kubelet, by how they ended.",
        samples=_allocations,
    ),
    Definition(
        name="npu_agent_allocation_seconds",
        kind="histogram",
        help="Seconds from an Allocate call to its answer.",
        samples=_allocation_seconds,
    ),
    Definition(
        name="npu_agent_preferred_allocations_total",
        kind="counter",
        help="Preferred allocations told to the kubelet, by where their devices lie.",
        samples=_preferred,
    ),
    Definition(
        name="npu_agent_kubelet_restarts_total",
        kind="counter",
        help="Times that the kubelet let go of the agent and took it on again.",
        samples=_kubelet_restarts,
    ),
    Definition(
        name="npu_agent_config_generation",
        help="The number of the configuration in force, counted from 1.",
        samples=_one(lambda own: own.config.generation),
    ),
    Definition(
        name="npu_agent_config_last_success_timestamp_seconds",
        help="When the configuration was last found good, in seconds since 1970.",
        samples=_one(lambda own: round(own.config.loaded_at, 3)),
    ),
    Definition(
        name="npu_agent_config_last_load_successful",
        help="Whether the config file is good as it is now: 1, or 0 while it is refused.",
        samples=_one(lambda own: own.config.error is None),
    ),
    Definition(
        name="npu_agent_config_rejected_total",
        kind="counter",
        help="Versions of the config file that were refused.",
        samples=_one(lambda own: own.config.rejected),
    ),
    Definition(
        name="npu_agent_config_restart_required",
        help="Whether a change of the config file waits for a restart: 1 or 0.",
        samples=_one(lambda own: bool(own.config.waiting)),
    ),
    Definition(
        name="npu_agent_labels_applied_total",
        kind="counter",
        help="What was done to the labels of the Node, by result.",
        samples=_by("result", lambda own: own.labels_applied),
    ),
    Definition(
        name="npu_agent_events_total",
        kind="counter",
        help="Events on the Node, by result.",
        samples=_by("result", lambda own: own.events),
    ),
    Definition(
        name="npu_agent_reading_age_seconds",
        help="Seconds since the card's figures were last read.",
        samples=_ages,
    ),
    Definition(
        name="npu_agent_reading_failures_total",
        kind="counter",
        help="Looks at a card that failed, by reason.",
        samples=_reading_failures,
    ),
    Definition(
        name="npu_agent_part_restarts_total",
        kind="counter",
        help="Times that a part of the agent failed and was started again.",
        samples=_by("part", lambda own: own.restarts),
    ),
    Definition(
        name="npu_agent_loop_lag_seconds",
        kind="histogram",
        help="Seconds that the event loop was late, measured once a second.",
        samples=lambda own: [(NONE, own.lag)],
    ),
    Definition(
        name="npu_agent_page_failures_total",
        kind="counter",
        help="Times that a family of metrics could not be made and was left out of the page.",
        samples=_by("family", lambda own: own.page_failures),
    ),
)
"""The families, in the order of the page."""
