"""What the agent says of itself; its labels and figures are in the golden pages."""

import asyncio
import resource
import time
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from npu_agent.core.counts import RESULTS, Counts
from npu_agent.core.state import ConfigState, SessionPhase, SessionStatus
from npu_agent.outputs.prometheus.own import LoopLag, of_process
from tests.outputs.helpers import RESOURCE
from tests.outputs.prometheus.helpers import families, own, parsed, values


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
                loaded_at=12.5,
                generation=4,
                errors=("line 3",),
                rejected=2,
                waiting=("socketName",),
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


CHANGES = {
    "process_cpu_seconds": 1.0,
    "process_virtual_memory_bytes": 4 << 20,
    "process_resident_memory_bytes": 4 << 20,
    "process_open_fds": 5,
}
"""By how much each may change between two calls, in its unit; the others stay as they are."""


def process(proc: Path = Path("/proc")) -> dict[str, Metric]:
    page = b"".join(family.render(openmetrics=False) for family in of_process(proc))
    return {metric.name: metric for metric in parsed(page, openmetrics=False)}


def test_process_metrics_equal_those_of_prometheus_client() -> None:
    theirs = {metric.name: metric for metric in ProcessCollector(registry=None).collect()}
    ours = process()
    assert ours.keys() == theirs.keys()
    for name, metric in theirs.items():
        mine = ours[name]
        assert (mine.documentation, mine.type) == (metric.documentation, metric.type)
        (sample,), (known,) = mine.samples, metric.samples
        assert (sample.name, sample.labels) == (known.name, known.labels)
        assert sample.value == pytest.approx(known.value, abs=CHANGES.get(name, 0.02))


def test_no_limit_is_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert "process_max_fds" not in process()


def test_a_name_with_brackets_is_not_taken_for_figures(tmp_path: Path) -> None:
    there = Path("/proc/self/stat").read_text(encoding="utf-8")
    before, _, after = there.partition(" (")
    _, _, figures = after.rpartition(") ")
    (tmp_path / "self/fd").mkdir(parents=True)
    (tmp_path / "self/stat").write_text(f"{before} (a) R 1 2 (b) {figures}", encoding="utf-8")
    (tmp_path / "self/statm").write_text("1 1 1\n", encoding="utf-8")
    (tmp_path / "stat").symlink_to("/proc/stat")
    name = "process_start_time_seconds"
    assert process(tmp_path)[name].samples == process()[name].samples


async def test_lag_is_how_much_later_it_is_woken() -> None:
    began = time.monotonic()
    lag = LoopLag(interval=0.5)  # long, as a second one must not come before this is read
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(0.65)  # noqa: ASYNC251 (it blocks the loop on purpose)
    async with asyncio.timeout(20):
        while not lag.seconds.total:
            await asyncio.sleep(0.01)
    task.cancel()
    assert 0.09 < lag.seconds.total < time.monotonic() - began
    assert sum(lag.seconds.counts) == 1
