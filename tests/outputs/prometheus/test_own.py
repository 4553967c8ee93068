"""What the agent says of itself."""

from collections import Counter

import pytest

from npu_agent.core.counts import RESULTS, Counts
from npu_agent.core.state import ConfigState, SessionPhase, SessionStatus
from npu_agent.outputs.prometheus.own import DEFINITIONS
from tests.outputs.helpers import RESOURCE
from tests.outputs.prometheus.helpers import (
    card,
    families,
    own,
    own_page,
    parsed,
    reading,
    series,
    snapshot,
    values,
)


def config(**changed: object) -> ConfigState:
    return ConfigState(loaded_at=12.5, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "shown"),
    [
        (SessionPhase.NO_CARDS, {}),
        (SessionPhase.STANDBY, {(RESOURCE,): 0}),
        (SessionPhase.REGISTERING, {(RESOURCE,): 0}),
        (SessionPhase.REGISTERED, {(RESOURCE,): 1}),
        (SessionPhase.BLOCKED, {(RESOURCE,): 0}),
        (SessionPhase.ENDED, {(RESOURCE,): 0}),
    ],
)
def test_registered_is_one_only_while_the_kubelet_holds_our_stream(
    phase: SessionPhase, shown: dict[tuple[str], float]
) -> None:
    status = SessionStatus(resource=RESOURCE, phase=phase, registrations=3)
    found = families(own((status, Counts())))
    assert values(found, "npu_agent_registered", "resource") == shown


def test_a_new_agent_shows_zeros_where_a_rise_should_be_seen() -> None:
    found = families(own())
    assert values(found, "npu_agent_allocations_total", "resource", "result") == {
        (RESOURCE, result): 0 for result in RESULTS
    }
    for name in ("list_and_watch_messages", "kubelet_restarts", "config_rejected"):
        assert set(values(found, f"npu_agent_{name}_total").values()) == {0}
    assert values(found, "npu_agent_allocation_seconds_count", "resource") == {(RESOURCE,): 0}
    assert values(found, "npu_agent_build_info", "version") == {("1.2.3",): 1}


def test_counts_of_two_resources() -> None:
    one, two = Counts(), Counts()
    one.messages, one.returns = 3, 1
    two.messages, two.returns = 5, 2
    one.allocated("granted", 0.0015)
    one.allocated("unknown", 0.5)
    two.preferred["one card"] = 4
    found = families(
        own(
            (SessionStatus(resource="a/one", phase=SessionPhase.REGISTERED), one),
            (SessionStatus(resource="a/two", phase=SessionPhase.REGISTERING), two),
        )
    )
    messages = values(found, "npu_agent_list_and_watch_messages_total", "resource")
    assert messages == {("a/one",): 3, ("a/two",): 5}
    allocations = values(found, "npu_agent_allocations_total", "resource", "result")
    assert {key: count for key, count in allocations.items() if count} == {
        ("a/one", "granted"): 1,
        ("a/one", "unknown"): 1,
    }
    buckets = values(found, "npu_agent_allocation_seconds_bucket", "resource", "le")
    assert [buckets["a/one", le] for le in ("0.001", "0.002", "0.1", "1.0", "+Inf")] == [
        0,
        1,
        1,
        2,
        2,
    ]
    assert values(found, "npu_agent_allocation_seconds_sum", "resource")[("a/one",)] == 0.5015
    preferred = values(found, "npu_agent_preferred_allocations_total", "resource", "reason")
    assert preferred == {("a/two", "one card"): 4}


def test_config_in_force_refused_and_waiting() -> None:
    names = (
        "generation",
        "last_success_timestamp_seconds",
        "last_load_successful",
        "rejected_total",
        "restart_required",
    )

    def shown(state: ConfigState) -> list[float]:
        found = families(own(config=state, now=1_700_000_100.0, monotonic=112.5))
        return [values(found, f"npu_agent_config_{name}")[()] for name in names]

    assert shown(config()) == [1, 1_700_000_000, 1, 0, 0]
    refused = config(generation=4, error="line 3: ...", rejected=2, waiting=("socketName",))
    assert shown(refused) == [4, 1_700_000_000, 0, 2, 1]


def test_age_and_failures_of_readings() -> None:
    found = families(
        own(
            monotonic=100.0,
            snapshot=snapshot(
                card("rngd", 0, reading=reading(97.5)),
                card("warboy", 0, reading=reading(100.25)),
                card("rngd", 1),
            ),
            reading_failures={("rngd", "npu1", "hung"): 3},
        )
    )
    assert values(found, "npu_agent_reading_age_seconds", "arch", "device") == {
        ("rngd", "npu0"): 2.5,
        ("warboy", "npu0"): 0,
    }
    failures = values(found, "npu_agent_reading_failures_total", "arch", "device", "reason")
    assert failures == {("rngd", "npu1", "hung"): 3}


def test_counts_of_other_parts() -> None:
    found = families(
        own(
            labels_applied=Counter(written=2),
            events=Counter(sent=5, lost=1),
            restarts=Counter({"watch of npu0": 1}),
            page_failures=Counter(furiosa_npu_alive=7),
        )
    )
    assert values(found, "npu_agent_labels_applied_total", "result") == {("written",): 2}
    assert values(found, "npu_agent_events_total", "result") == {("sent",): 5, ("lost",): 1}
    assert values(found, "npu_agent_part_restarts_total", "part") == {("watch of npu0",): 1}
    assert values(found, "npu_agent_page_failures_total", "family") == {("furiosa_npu_alive",): 7}


@pytest.mark.parametrize("openmetrics", [False, True])
def test_both_formats_can_be_read(openmetrics: bool) -> None:
    state = own(events={'"\n\ud800': 1})
    page = own_page(state, openmetrics=openmetrics) + (b"# EOF\n" if openmetrics else b"")
    assert series(parsed(page, openmetrics=openmetrics)) == series(families(state))


def test_names_say_what_they_are() -> None:
    for definition in DEFINITIONS:
        assert definition.name.endswith("_total") == (definition.kind == "counter")
        assert definition.help.endswith(".")
