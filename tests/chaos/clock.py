"""`python -m tests.chaos.clock DIRECTORY run ...`: as bench.pod, with a clock that can be set.

The file `clock` in the directory says by how many seconds the wall clock is wrong. The machine's
own clock is everybody's, and a kernel has no other one for a process.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

FILE = Path(sys.argv[1]) / "clock"
right = time.time


def wrong() -> float:
    """The time, as the agent sees it."""
    try:
        return right() + float(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return right()


if __name__ == "__main__":
    time.time = wrong
    runpy.run_module("bench.pod", run_name="__main__")
