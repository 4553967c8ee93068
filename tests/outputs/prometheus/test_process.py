import resource
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from npu_agent.outputs.prometheus import process
from tests.outputs.prometheus.helpers import parsed

CHANGES = {
    "process_cpu_seconds": 1.0,
    "process_virtual_memory_bytes": 4 << 20,
    "process_resident_memory_bytes": 4 << 20,
    "process_open_fds": 5,
}
"""By how much each may change between two calls, in its unit; the others stay as they are."""


def families(proc: Path = Path("/proc")) -> dict[str, Metric]:
    page = b"".join(family.render(openmetrics=False) for family in process.families(proc))
    return {metric.name: metric for metric in parsed(page, openmetrics=False)}


def test_it_says_what_prometheus_client_says() -> None:
    theirs = {metric.name: metric for metric in ProcessCollector(registry=None).collect()}
    ours = families()
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
    assert "process_max_fds" not in families()


def test_a_name_with_brackets_is_not_taken_for_figures(tmp_path: Path) -> None:
    there = Path("/proc/self/stat").read_text()
    before, _, after = there.partition(" (")
    _, _, figures = after.rpartition(") ")
    (tmp_path / "self/fd").mkdir(parents=True)
    (tmp_path / "self/stat").write_text(f"{before} (a) R 1 2 (b) {figures}")
    (tmp_path / "self/statm").write_text("1 1 1\n")
    (tmp_path / "stat").symlink_to("/proc/stat")
    name = "process_start_time_seconds"
    assert families(tmp_path)[name].samples == families()[name].samples
