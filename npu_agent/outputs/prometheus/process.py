"""``process_*``: what this process uses, under the names that every Prometheus client gives it.

Why not prometheus_client's own: it has 1.4 MiB, for six numbers that are read here.
"""

from __future__ import annotations

import os
import resource
import time
from functools import cache
from pathlib import Path

from npu_agent.outputs.prometheus.text import MetricFamily


def families(proc: Path = Path("/proc")) -> tuple[MetricFamily, ...]:
    """The families of this process now.

    Raises:
        OSError, ValueError: /proc is not as proc_pid_stat(5) and proc_pid_statm(5) say.
    """
    page = resource.getpagesize()
    virtual, resident = (int(pages) for pages in (proc / "self/statm").read_text().split()[:2])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = sum(1 for _ in (proc / "self/fd").iterdir())
    most = None if limit == resource.RLIM_INFINITY else limit
    spent, started_at = time.process_time(), _started_at(proc)
    values: tuple[tuple[str, float | None, str], ...] = (
        ("virtual_memory_bytes", virtual * page, "Virtual memory size in bytes."),
        ("resident_memory_bytes", resident * page, "Resident memory size in bytes."),
        (
            "start_time_seconds",
            started_at,
            "Start time of the process since unix epoch in seconds.",
        ),
        ("cpu_seconds_total", spent, "Total user and system CPU time spent in seconds."),
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
