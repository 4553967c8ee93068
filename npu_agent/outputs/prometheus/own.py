"""The agent's own metrics: its state in, metric families out. Pure.

A series whose subject is absent (a resource that never had a card, a card without a reading) is
absent too: docs/metrics.md.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping

from npu_agent.core.api_mode import WantedApi
from npu_agent.core.counts import Counts, Histogram
from npu_agent.core.state import AgentState, DraState, SessionPhase
from npu_agent.outputs.prometheus.text import NONE, Definition, Labels, Samples


def _build(state: AgentState) -> Samples:
    python = platform.python_version()
    yield Labels(version=state.version, python=python, hostname=state.hostname), 1


def _registered(state: AgentState) -> Samples:
    """1 only while the kubelet holds our stream open: nothing else is proof."""
    for one in state.resources:
        phase = one.session.phase
        if phase is not SessionPhase.NO_CARDS:
            yield Labels(resource=one.session.resource), phase is SessionPhase.REGISTERED


def _ages(state: AgentState) -> Samples:
    for card in state.snapshot.cards:
        if card.reading:
            labels = Labels(arch=card.card.family, device=card.card.name)
            yield labels, round(max(0.0, state.monotonic - card.reading.at), 3)


def _reading_failures(state: AgentState) -> Samples:
    for (family, card, reason), count in state.reading_failures.items():
        yield Labels(arch=family, device=card, reason=reason), count


def _certificate_expires(state: AgentState) -> Samples:
    if state.tls is not None and state.tls.expires_at is not None:
        yield NONE, state.tls.expires_at


def _certificate_good(state: AgentState) -> Samples:
    if state.tls is not None:
        yield NONE, state.tls.error is None and (state.tls.expires_at or 0) > state.now


def _refused(state: AgentState) -> Samples:
    for (listener, reason), count in state.refused.items():
        yield Labels(listener=listener, reason=reason), count


def _of_resource(value: Callable[[Counts], float | Histogram]) -> Callable[[AgentState], Samples]:
    return lambda state: [
        (Labels(resource=one.session.resource), value(one.counts)) for one in state.resources
    ]


def _of_resource_by(
    label: str, counts: Callable[[Counts], Mapping[str, int]]
) -> Callable[[AgentState], Samples]:
    def samples(state: AgentState) -> Samples:
        for one in state.resources:
            for value, count in counts(one.counts).items():
                yield Labels(resource=one.session.resource, **{label: value}), count

    return samples


def _of_driver(value: Callable[[DraState], float | Histogram]) -> Callable[[AgentState], Samples]:
    return lambda state: [(Labels(driver=one.name), value(one)) for one in state.dra]


def _of_driver_by_result(
    counts: Callable[[DraState], Mapping[str, int]],
) -> Callable[[AgentState], Samples]:
    return lambda state: [
        (Labels(driver=one.name, result=result), count)
        for one in state.dra
        for result, count in counts(one).items()
    ]


def _by(
    label: str, counts: Callable[[AgentState], Mapping[str, int]]
) -> Callable[[AgentState], Samples]:
    return lambda state: [
        (Labels(**{label: value}), count) for value, count in counts(state).items()
    ]


def _one(value: Callable[[AgentState], float | Histogram]) -> Callable[[AgentState], Samples]:
    return lambda state: [(NONE, value(state))]


def _moving(state: AgentState) -> Samples:
    for to in (WantedApi.DRA, WantedApi.PLUGIN) if state.dra else ():
        count = sum(wish is to for wish in state.moving.values())
        yield Labels(to=to.value), count


DEFINITIONS: tuple[Definition[AgentState], ...] = (
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
        samples=_of_resource_by("result", lambda counts: counts.allocations),
    ),
    Definition(
        name="npu_agent_allocation_seconds",
        kind="histogram",
        help="Seconds from an Allocate call to its answer.",
        samples=_of_resource(lambda counts: counts.allocation_seconds),
    ),
    Definition(
        name="npu_agent_preferred_allocations_total",
        kind="counter",
        help="Answers to GetPreferredAllocation, by how close their devices are to each other.",
        samples=_of_resource_by("reason", lambda counts: counts.preferred),
    ),
    Definition(
        name="npu_agent_kubelet_restarts_total",
        kind="counter",
        help="Times that the registration at the kubelet was lost and made again.",
        samples=_one(lambda state: state.kubelet_restarts),
    ),
    Definition(
        name="npu_agent_dra_registered",
        help="Whether the kubelet has registered the DRA driver: 1 or 0.",
        samples=_of_driver(lambda one: one.session.phase is SessionPhase.REGISTERED),
    ),
    Definition(
        name="npu_agent_dra_slices_published",
        help="Whether the API server has the driver's ResourceSlices as they should be: 1 or 0.",
        samples=_of_driver(lambda one: one.slices.published),
    ),
    Definition(
        name="npu_agent_dra_pool_incomplete",
        help="Whether ResourceSlices of the pool are missing, so that the scheduler allocates "
        "nothing of it: 1 or 0.",
        samples=_of_driver(lambda one: one.slices.incomplete),
    ),
    Definition(
        name="npu_agent_dra_slices_written_total",
        kind="counter",
        help="ResourceSlices written or deleted.",
        samples=_of_driver(lambda one: one.slices.writes),
    ),
    Definition(
        name="npu_agent_dra_claims",
        help="Claims that are prepared now.",
        samples=_of_driver(lambda one: len(one.claims)),
    ),
    Definition(
        name="npu_agent_dra_moving_cards",
        help="Cards on their way from one API to the other, which their Pods still hold.",
        samples=_moving,
    ),
    Definition(
        name="npu_agent_dra_prepares_total",
        kind="counter",
        help="Claims that the kubelet had prepared, by how that ended.",
        samples=_of_driver_by_result(lambda one: one.counts.prepares),
    ),
    Definition(
        name="npu_agent_dra_prepare_seconds",
        kind="histogram",
        help="Seconds that preparing a claim took, refusals and failures included.",
        samples=_of_driver(lambda one: one.counts.prepare_seconds),
    ),
    Definition(
        name="npu_agent_dra_unprepares_total",
        kind="counter",
        help="Claims that the kubelet had unprepared, by how that ended.",
        samples=_of_driver_by_result(lambda one: one.counts.unprepares),
    ),
    Definition(
        name="npu_agent_config_generation",
        help="The number of the configuration in force, counted from 1.",
        samples=_one(lambda state: state.config.generation),
    ),
    Definition(
        name="npu_agent_config_last_success_timestamp_seconds",
        help="When the configuration was last found good, in seconds since 1970.",
        samples=_one(lambda state: round(state.wall(state.config.loaded_at), 3)),
    ),
    Definition(
        name="npu_agent_config_last_load_successful",
        help="Whether the present config file is good: 1, or 0 while it is refused.",
        samples=_one(lambda state: state.config.error is None),
    ),
    Definition(
        name="npu_agent_config_rejected_total",
        kind="counter",
        help="Versions of the config file that were refused.",
        samples=_one(lambda state: state.config.rejected),
    ),
    Definition(
        name="npu_agent_config_restart_required",
        help="Whether a change of the config file waits for a restart: 1 or 0.",
        samples=_one(lambda state: bool(state.config.waiting)),
    ),
    Definition(
        name="npu_agent_labels_applied_total",
        kind="counter",
        help="Attempts to apply the labels of the Node, by result.",
        samples=_by("result", lambda state: state.labels_applied),
    ),
    Definition(
        name="npu_agent_events_total",
        kind="counter",
        help="Events about the Node, by result.",
        samples=_by("result", lambda state: state.events),
    ),
    Definition(
        name="npu_agent_reading_age_seconds",
        help="Seconds since the telemetry of the card was last read.",
        samples=_ages,
    ),
    Definition(
        name="npu_agent_reading_failures_total",
        kind="counter",
        help="Probes and readings of a card that failed, by reason.",
        samples=_reading_failures,
    ),
    Definition(
        name="npu_agent_part_restarts_total",
        kind="counter",
        help="Times that a part of the agent failed and was started again.",
        samples=_by("part", lambda state: state.restarts),
    ),
    Definition(
        name="npu_agent_loop_lag_seconds",
        kind="histogram",
        help="Seconds that the event loop was late, measured every 5 seconds.",
        samples=_one(lambda state: state.lag),
    ),
    Definition(
        name="npu_agent_page_failures_total",
        kind="counter",
        help="Times that a family of metrics failed to render and was left out of the page.",
        samples=_by("family", lambda state: state.page_failures),
    ),
    Definition(
        name="npu_agent_connections_refused_total",
        kind="counter",
        help="Connections ended for newer ones, as too many were open, by listener and reason.",
        samples=_refused,
    ),
    Definition(
        name="npu_agent_authorizations_total",
        kind="counter",
        help="Requests for pages that needed a token, by what became of them.",
        samples=_by("result", lambda state: state.authorizations),
    ),
    Definition(
        name="npu_agent_tls_certificate_expires_timestamp_seconds",
        help="When the certificate in force expires, in seconds since 1970.",
        samples=_certificate_expires,
    ),
    Definition(
        name="npu_agent_tls_certificate_good",
        help="Whether the certificate files are good, and the one in force is not expired: 1 or 0.",
        samples=_certificate_good,
    ),
)
"""The families, in the order of the page."""
