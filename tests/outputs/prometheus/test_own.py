"""What the agent says of itself; its labels and figures are in the golden pages."""

import pytest

from npu_agent.core.counts import RESULTS, Counts
from npu_agent.core.state import ConfigState, SessionPhase, SessionStatus
from tests.outputs.helpers import RESOURCE
from tests.outputs.prometheus.helpers import families, own, values


@pytest.mark.parametrize(
    ("phase", "shown"),
    [
        (SessionPhase.NO_CARDS, {}),
        (SessionPhase.STANDBY, {(RESOURCE,): 0}),
        (SessionPhase.REGISTERED, {(RESOURCE,): 1}),
        (SessionPhase.BLOCKED, {(RESOURCE,): 0}),
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


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (ConfigState(loaded_at=12.5), [1, 1_700_000_000, 1, 0, 0]),
        (
            ConfigState(
                loaded_at=12.5, generation=4, error="line 3", rejected=2, waiting=("socketName",)
            ),
            [4, 1_700_000_000, 0, 2, 1],
        ),
    ],
)
def test_config_in_force_refused_and_waiting(config: ConfigState, shown: list[float]) -> None:
    found = families(own(config=config, now=1_700_000_100.0, monotonic=112.5))
    names = (
        *("generation", "last_success_timestamp_seconds", "last_load_successful"),
        *("rejected_total", "restart_required"),
    )
    assert [values(found, f"npu_agent_config_{name}")[()] for name in names] == shown
