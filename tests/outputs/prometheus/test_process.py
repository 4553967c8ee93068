import os
import resource
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from npu_agent.outputs.prometheus import process
from npu_agent.outputs.prometheus.process import DEFINITIONS, this_process
from tests.outputs.prometheus.helpers import parsed

CHANGES = {
    "process_cpu_seconds": 1.0,
    "process_virtual_memory_bytes": 4 << 20,
    "process_resident_memory_bytes": 4 << 20,
    "process_open_fds": 5,
}
"""By how much each may change between two calls, in its unit; the others stay as they are."""


def families(*, openmetrics: bool) -> list[Metric]:
    now = this_process()
    page = b"".join(each.render(now, openmetrics=openmetrics) for each in DEFINITIONS)
    return parsed(page + (b"# EOF\n" if openmetrics else b""), openmetrics=openmetrics)


@pytest.mark.parametrize("openmetrics", [False, True])
def test_it_says_what_prometheus_client_says(openmetrics: bool) -> None:
    theirs = {metric.name: metric for metric in ProcessCollector(registry=None).collect()}
    ours = {metric.name: metric for metric in families(openmetrics=openmetrics)}
    assert ours.keys() == theirs.keys()
    for name, metric in theirs.items():
        mine = ours[name]
        assert (mine.documentation, mine.type) == (metric.documentation, metric.type)
        (sample,), (known,) = mine.samples, metric.samples
        assert (sample.name, sample.labels) == (known.name, known.labels)
        assert sample.value == pytest.approx(known.value, abs=CHANGES.get(name, 0.02))


def test_open_files_are_counted() -> None:
    before = this_process().files
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
    assert this_process().files == pytest.approx(before + 50, abs=5)  # a thread may have others
    for file in opened:
        os.close(file)


def test_no_limit_is_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert this_process().most_files is None
    assert "process_max_fds" not in {metric.name for metric in families(openmetrics=False)}


def test_a_name_with_brackets_is_not_taken_for_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = process._started_at()
    there = Path("/proc/self/stat").read_text()
    before, _, after = there.partition(" (")
    _, _, figures = after.rpartition(") ")
    (tmp_path / "stat").write_text(f"{before} (a) R 1 2 (b) {figures}")
    process._started_at.cache_clear()
    monkeypatch.setattr(process, "_SELF", tmp_path)
    assert process._started_at() == known
