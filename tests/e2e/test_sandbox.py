"""A node's namespaces end without a trace, whatever happened to the processes in them."""

import os
import signal
import tempfile
from pathlib import Path

from tests.cluster.sandbox import CGROUPS, Sandbox, wait_until


def test_a_process_that_was_stopped_and_continued_leaves_nothing_behind() -> None:
    """Its `nsenter` stops itself, and nobody continues that one."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="npu-") as directory:
        sandbox = Sandbox.start(Path(directory), "192.0.2.254", "198.51.100.1")
        try:
            process = sandbox.spawn("sleeper", "sleep", "1000")
            (nsenter,) = (popen.pid for popen in sandbox._processes.values())
            os.kill(process.pid, signal.SIGSTOP)
            stat = Path(f"/proc/{nsenter}/stat")
            assert wait_until(lambda: ") T " in stat.read_text(), 10)
            os.kill(process.pid, signal.SIGCONT)
            Sandbox.attach(Path(directory)).stop()  # as `python -m tests.cluster down` does
        finally:
            sandbox.stop()
        assert [each.name for each in Path(directory).iterdir()] == ["logs"]
        assert list(CGROUPS.rglob(sandbox.cgroup)) == []
