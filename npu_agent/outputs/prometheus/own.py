"""The agent's own metrics: those of its state, of its process and of its loop.

A series without a subject (a resource that never had a card) is absent: docs/metrics.md.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from npu_agent.core.counts import Histogram
from npu_agent.core.state import AgentState, SessionPhase
from npu_agent.outputs.prometheus.text import Kind, MetricFamily, label_text
from npu_agent.ticks import until_tick

Named = tuple[str, str, float | Histogram]
"""A sample: the family without ``npu_agent_``, labels and value."""

_HELP = {
    "build_info": "The version of npu-agent and of Python, and the Node, in the labels; always 1.",
    "registered": "Whether the kubelet holds the resource's stream open: 1 or 0.",
    "list_and_watch_messages_total": "Device lists sent to the kubelet.",
    "allocations_total": "Allocate calls of the kubelet, by result.",
    "allocation_seconds": "Seconds from an Allocate call to its answer.",
    "preferred_allocations_total": "Answers to GetPreferredAllocation, by how close their devices "
    "are to each other.",
    "kubelet_restarts_total": "Registrations at the kubelet that were lost and made again.",
    "dra_registered": "Whether the kubelet has registered the DRA driver: 1 or 0.",
    "dra_slices_published": "Whether the driver's ResourceSlices at the API server are up to "
    "date: 1 or 0.",
    "dra_pool_incomplete": "Whether ResourceSlices of the pool are missing: 1 or 0. The "
    "scheduler ignores such a pool.",
    "dra_slices_written_total": "ResourceSlices written or deleted.",
    "dra_claims": "Claims that are prepared now.",
    "dra_prepares_total": "Claims that the kubelet asked to prepare, by result.",
    "dra_prepare_seconds": "Seconds that preparing a claim took, refusals and failures included.",
    "dra_unprepares_total": "Claims that the kubelet asked to unprepare, by result.",
    "config_generation": "The number of the configuration in force, counted from 1.",
    "config_last_success_timestamp_seconds": "When the configuration was last found good, in "
    "seconds since 1970.",
    "config_last_load_successful": "Whether the present config file is good: 1, or 0 while it is "
    "refused.",
    "config_rejected_total": "Versions of the config file that were refused.",
    "config_restart_required": "Whether a change of the config file waits for a restart: 1 or 0.",
    "labels_applied_total": "Attempts to apply the labels of the Node, by result.",
    "node_condition": "Whether the condition of the Node is True: 1 or 0.",
    "node_condition_written": "Whether the condition of the Node could be written: 1 or 0.",
    "node_maintenance": "Whether the Node is marked as under maintenance: 1 or 0.",
    "cards_expected": "The cards that the node should have: health.expectedCards.",
    "card_cordoned": "Whether a person has taken the card out of service: 1 or 0.",
    "card_degraded": "A working card that is degraded, by cause; always 1.",
    "events_total": "Events about the Node, by result.",
    "evictions_total": "Pods of failed cards that were to be evicted, by result.",
    "reading_age_seconds": "Seconds since the telemetry of the card was last read.",
    "reading_failures_total": "Probes and readings of a card that failed, by reason.",
    "part_restarts_total": "Restarts of a part of the agent after a failure.",
    "loop_lag_seconds": "Seconds that the event loop was late, measured every 5 seconds.",
    "page_failures_total": "Times that a family of metrics failed to render and was left out of "
    "the page.",
    "connections_refused_total": "Connections closed because too many were open, by listener and "
    "reason.",
    "authorizations_total": "Requests for pages that need a token, by result.",
    "tls_certificate_expires_timestamp_seconds": "When the certificate in force expires, in "
    "seconds since 1970.",
    "tls_certificate_good": "Whether the certificate files are good, and the one in force is not "
    "expired: 1 or 0.",
}
_HISTOGRAMS = ("allocation_seconds", "dra_prepare_seconds", "loop_lag_seconds")
_LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def families(state: AgentState) -> tuple[MetricFamily, ...]:
    samples: dict[str, list[tuple[str, float | Histogram]]] = defaultdict(list)
    for part in (_agent(state), _resources(state), _drivers(state), _cards(state)):
        for name, labels, value in part:
            samples[name].append((labels, value))
    return tuple(
        MetricFamily(name=f"npu_agent_{name}", kind=_kind(name), help=text, samples=samples[name])
        for name, text in _HELP.items()
    )


def _agent(state: AgentState) -> Iterator[Named]:
    version = state.version
    python = platform.python_version()
    yield "build_info", label_text(version=version, python=python, hostname=state.hostname), 1
    yield "kubelet_restarts_total", "", state.kubelet_restarts
    config = state.config
    yield "config_generation", "", config.generation
    yield "config_last_success_timestamp_seconds", "", round(state.wall(config.loaded_at), 3)
    yield "config_last_load_successful", "", config.error is None
    yield "config_rejected_total", "", config.rejected
    yield "config_restart_required", "", bool(config.waiting)
    yield "loop_lag_seconds", "", state.lag
    yield from _by("labels_applied_total", "", "result", state.labels_applied)
    yield from _by("events_total", "", "result", state.events)
    yield from _by("evictions_total", "", "result", state.evictions.results)
    yield from _by("part_restarts_total", "", "part", state.restarts)
    yield from _by("page_failures_total", "", "family", state.page_failures)
    yield from _by("authorizations_total", "", "result", state.authorizations)
    for (listener, reason), count in state.refused.items():
        yield "connections_refused_total", label_text(listener=listener, reason=reason), count
    if (condition := state.condition) is not None:
        labels = label_text(type=condition.type)
        if condition.status is not None:
            yield "node_condition", labels, condition.status
        yield "node_condition_written", labels, condition.error is None
    yield "node_maintenance", "", bool(state.maintenance)
    if state.expected_cards is not None:
        yield "cards_expected", "", state.expected_cards
    if state.tls is not None:
        expires_at = state.tls.expires_at
        if expires_at is not None:
            yield "tls_certificate_expires_timestamp_seconds", "", expires_at
        good = state.tls.error is None and (expires_at or 0) > state.now
        yield "tls_certificate_good", "", good


def _resources(state: AgentState) -> Iterator[Named]:
    for served in state.resources:
        labels = label_text(resource=served.session.resource)
        counts = served.counts

        if served.session.phase is not SessionPhase.NO_CARDS:
            # 1 only while the kubelet holds our stream open: nothing else is proof.
            yield "registered", labels, served.session.phase is SessionPhase.REGISTERED
        yield "list_and_watch_messages_total", labels, counts.messages
        yield from _by("allocations_total", labels, "result", counts.allocations)
        yield "allocation_seconds", labels, counts.allocation_seconds
        yield from _by("preferred_allocations_total", labels, "reason", counts.preferred)


def _drivers(state: AgentState) -> Iterator[Named]:
    for driver in state.dra:
        labels = label_text(driver=driver.name)
        counts = driver.counts
        yield "dra_registered", labels, driver.session.phase is SessionPhase.REGISTERED
        yield "dra_slices_published", labels, driver.slices.published
        yield "dra_pool_incomplete", labels, driver.slices.incomplete
        yield "dra_slices_written_total", labels, driver.slices.writes
        yield "dra_claims", labels, len(driver.claims)
        yield from _by("dra_prepares_total", labels, "result", counts.prepares)
        yield "dra_prepare_seconds", labels, counts.prepare_seconds
        yield from _by("dra_unprepares_total", labels, "result", counts.unprepares)


def _cards(state: AgentState) -> Iterator[Named]:
    for card in state.snapshot.cards:
        labels = label_text(arch=card.card.family, device=card.card.name)
        if card.reading:
            age = round(max(0.0, state.monotonic - card.reading.at), 3)
            yield "reading_age_seconds", labels, age
        yield "card_cordoned", labels, card.id in state.cordons
        for kind in sorted(kind.value for kind, id_ in state.trends.found if id_ == card.id):
            yield "card_degraded", label_text(labels, cause=kind), 1
    for (family, name, reason), count in state.reading_failures.items():
        yield "reading_failures_total", label_text(arch=family, device=name, reason=reason), count


def _by(name: str, labels: str, label: str, counts: Mapping[str, int]) -> Iterator[Named]:
    for key, count in counts.items():
        yield name, label_text(labels, **{label: key}), count


def _kind(name: str) -> Kind:
    if name in _HISTOGRAMS:
        return "histogram"
    return "counter" if name.endswith("_total") else "gauge"


def of_process(proc: Path = Path("/proc")) -> tuple[MetricFamily, ...]:
    """What this process uses now, under the names that every Prometheus client gives it.

    Why not prometheus_client's own: it has 1.4 MiB, for six numbers that are read here.

    Raises:
        OSError, ValueError: /proc is not as proc_pid_stat(5) and proc_pid_statm(5) say.
    """
    page = resource.getpagesize()
    virtual, resident = (int(pages) for pages in (proc / "self/statm").read_bytes().split()[:2])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = sum(1 for _ in (proc / "self/fd").iterdir())
    most = None if limit == resource.RLIM_INFINITY else limit
    values: tuple[tuple[str, float | None, str], ...] = (
        ("virtual_memory_bytes", virtual * page, "Virtual memory size in bytes."),
        ("resident_memory_bytes", resident * page, "Resident memory size in bytes."),
        (
            "start_time_seconds",
            _started_at(proc),
            "Start time of the process since unix epoch in seconds.",
        ),
        (
            "cpu_seconds_total",
            time.process_time(),
            "Total user and system CPU time spent in seconds.",
        ),
        ("open_fds", files, "Number of open file descriptors."),
        ("max_fds", most, "Maximum number of open file descriptors."),
    )
    return tuple(
        MetricFamily(
            name=f"process_{name}",
            kind="counter" if name.endswith("_total") else "gauge",
            help=text,
            samples=[("", value)],
        )
        for name, value, text in values
    )


# /proc/stat is long where there are many CPUs; and alerts take another start time for a restart, so
# that it stays what it was when the wall clock is set.
@cache
def _started_at(proc: Path) -> float:
    """Seconds since 1970."""
    # What comes after the name of the program, which may have spaces and brackets.
    stat = (proc / "self/stat").read_bytes().rpartition(b")")[2].split()
    booted_at = next(
        float(line.split()[1])
        for line in (proc / "stat").read_bytes().splitlines()
        if line.startswith(b"btime ")
    )
    return booted_at + int(stat[19]) / os.sysconf("SC_CLK_TCK")


class LoopLag:
    """Measures how much later than asked the loop wakes it, as all on it: Allocate, too.

    A histogram serves any number of scrapers, and loses nothing with a lost scrape.
    """

    def __init__(self, interval: float = 5.0) -> None:
        """`interval` is in seconds."""
        self._interval = interval
        self.seconds = Histogram(_LAGS)

    async def run(self) -> None:
        while True:
            pause = until_tick(self._interval)
            due = time.monotonic() + pause
            await asyncio.sleep(pause)
            self.seconds.add(max(0.0, time.monotonic() - due))
