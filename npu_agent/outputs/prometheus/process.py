"""``process_*``: what this process uses, under the names that every Prometheus client gives it.

Why not prometheus_client's own: it has 1.4 MiB, for six numbers that are read here.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from npu_agent.outputs.prometheus.text import Samples, by_name

_HELP = {
    "process_virtual_memory_bytes": "Virtual memory size in bytes.",
    "process_resident_memory_bytes": "Resident memory size in bytes.",
    "process_start_time_seconds": "Start time of the process since unix epoch in seconds.",
    "process_cpu_seconds_total": "Total user and system CPU time spent in seconds.",
    "process_open_fds": "Number of open file descriptors.",
    "process_max_fds": "Maximum number of open file descriptors.",
}
DEFINITIONS = tuple(
    by_name(name, text, kind="counter" if name.endswith("_total") else "gauge")
    for name, text in _HELP.items()
)


def read(proc: Path = Path("/proc")) -> Mapping[str, Samples]:
    """The sample of each family for this process now.

    Raises:
        OSError, ValueError: /proc is not as proc_pid_stat(5) and proc_pid_statm(5) say.
    """
    page = resource.getpagesize()
    virtual, resident = (int(pages) for pages in (proc / "self/statm").read_text().split()[:2])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    values = {
        "process_virtual_memory_bytes": virtual * page,
        "process_resident_memory_bytes": resident * page,
        "process_start_time_seconds": _started_at(proc),
        "process_cpu_seconds_total": time.process_time(),
        "process_open_fds": sum(1 for _ in (proc / "self/fd").iterdir()),
        "process_max_fds": None if limit == resource.RLIM_INFINITY else limit,
    }
    return {name: [("", value)] for name, value in values.items()}


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
