"""`python -m tests.chaos.mute DIRECTORY run ...`: as bench.pod, with a log that nobody reads."""

from __future__ import annotations

import fcntl
import os
import runpy
import sys

if __name__ == "__main__":
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.dup2(writer, sys.stderr.fileno())
    runpy.run_module("bench.pod", run_name="__main__")
