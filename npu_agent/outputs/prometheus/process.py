"""``process_*``: what this process uses, under the names that every Prometheus client gives it.

Why not prometheus_client's own: it has 1.4 MiB, for six numbers that are read here.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from npu_agent.outputs.prometheus.text import NONE, Definition, Samples

_SELF = Path("/proc/self")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What the kernel says of this process."""

    cpu: float
    """Seconds of user and system time since its start."""
    virtual: int
    """Bytes."""
    resident: int
    """Bytes."""
    started_at: float
    """Seconds since 1970."""
    files: int
    """Open file descriptors."""
    most_files: int | None
    """How many it may have open; None: any number."""


def this_process() -> Process:
    """This process now.

    Raises:
        OSError: there is no /proc.
        ValueError: /proc is not as proc_pid_stat(5) and proc_pid_statm(5) say.
    """
    page = resource.getpagesize()
    virtual, resident = (int(pages) for pages in (_SELF / "statm").read_text().split()[:2])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Process(
        cpu=time.process_time(),
        virtual=virtual * page,
        resident=resident * page,
        started_at=_started_at(),
        files=sum(1 for _ in (_SELF / "fd").iterdir()),
        most_files=None if most == resource.RLIM_INFINITY else most,
    )


# /proc/stat is long where there are many CPUs; and alerts take another start time for a restart, so
# that it stays what it was when the wall clock is set.
@cache
def _started_at() -> float:
    """Seconds since 1970."""
    # What comes after the name of the program, which may have spaces and brackets.
    stat = (_SELF / "stat").read_bytes().rpartition(b")")[2].split()
    booted_at = next(
        float(line.split()[1])
        for line in Path("/proc/stat").read_bytes().splitlines()
        if line.startswith(b"btime ")
    )
    return booted_at + int(stat[19]) / os.sysconf("SC_CLK_TCK")


def _one(value: Callable[[Process], float | None]) -> Callable[[Process], Samples]:
    return lambda process: [(NONE, value(process))]


DEFINITIONS: tuple[Definition[Process], ...] = (
    Definition(
        name="process_virtual_memory_bytes",
        help="Virtual memory size in bytes.",
        samples=_one(lambda process: process.virtual),
    ),
    Definition(
        name="process_resident_memory_bytes",
        help="Resident memory size in bytes.",
        samples=_one(lambda process: process.resident),
    ),
    Definition(
        name="process_start_time_seconds",
        help="Start time of the process since unix epoch in seconds.",
        samples=_one(lambda process: process.started_at),
    ),
    Definition(
        name="process_cpu_seconds_total",
        kind="counter",
        help="Total user and system CPU time spent in seconds.",
        samples=_one(lambda process: process.cpu),
    ),
    Definition(
        name="process_open_fds",
        help="Number of open file descriptors.",
        samples=_one(lambda process: process.files),
    ),
    Definition(
        name="process_max_fds",
        help="Maximum number of open file descriptors.",
        samples=_one(lambda process: process.most_files),
    ),
)
"""The families, in the order of the page."""
