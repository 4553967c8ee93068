"""A systemd of our own as the first process of namespaces, and containers whose cgroups it makes.

It has cgroups of version 2 alone, as most nodes today. No service of this machine is started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.cluster.sandbox import CGROUPS, wait_until
from tests.e2e.node import unified

_START = """
mount --make-rprivate /
mount -t proc proc /proc
umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs tmpfs /run
exec /lib/systemd/systemd --system --unit=idle.target --log-target=null --show-status=no
"""
_MADE = "/run/systemd/system.control:/run/systemd/transient"
"""Where units are that were made at run time, such as a container's."""
_PATIENCE = 20.0


class Systemd:
    """Runs until its context ends."""

    def __init__(self, pid: int, directory: Path) -> None:
        self._enter = ("nsenter", f"--target={pid}", "--all")
        self._directory = directory

    def run(self, *command: str) -> str:
        """What a command says in its namespaces."""
        done = subprocess.run([*self._enter, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def start(self, name: str, script: str, linux: dict[str, Any]) -> Path:
        """Runs a shell script in a container; returns its root directory.

        `linux` is what the OCI spec has of devices: ``devices``, and ``resources`` with the rules.
        """
        bundle = self._directory / name
        root = bundle / "root"
        (root / "bin").mkdir(parents=True)
        shutil.copy("/bin/busybox", root / "bin")
        for applet in ("mv", "sh", "usleep"):
            (root / "bin" / applet).symlink_to("busybox")
        spaces = [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]
        container = {
            "ociVersion": "1.0.2",
            "root": {"path": str(root)},
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["sh", "-c", script],
                "env": ["PATH=/bin"],
                "cwd": "/",
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            ],
            "linux": {**linux, "namespaces": spaces, "cgroupsPath": f"system.slice:npu:{name}"},
        }
        (bundle / "config.json").write_text(json.dumps(container))
        # Not captured: the container would keep the pipes.
        with (bundle / "log").open("w") as log:
            runc = ("runc", "--systemd-cgroup", "run", "--detach", f"--bundle={bundle}", name)
            done = subprocess.run(
                [*self._enter, *runc], stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
            )
        assert done.returncode == 0, (bundle / "log").read_text()
        return root


@contextmanager
def systemd(directory: Path) -> Iterator[Systemd]:
    """Starts one; containers have their files in the directory."""
    (directory / "idle.target").write_text("[Unit]\nDefaultDependencies=no\n")
    own = [path / f"npu-agent-systemd-{os.getpid()}" for path in _hierarchies()]
    for path in own:
        path.mkdir()
    join = "".join(f"echo $$ >{path}/cgroup.procs\n" for path in own)
    spaces = "--fork --pid --mount --cgroup --ipc --uts --kill-child"
    environment = {
        "PATH": os.environ["PATH"],
        "SYSTEMD_UNIT_PATH": f"{_MADE}:{directory}",
        "container": "npu-agent",  # so it leaves this machine's devices and clock alone
    }
    process = subprocess.Popen(
        ["sh", "-ec", f'{join}exec unshare {spaces} sh -ec "$0"', _START],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield Systemd(_ready(process.pid), directory)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(_PATIENCE)
        assert wait_until(lambda: all(map(_removed, own)), _PATIENCE), own


def _hierarchies() -> list[Path]:
    """Those that a cgroup namespace has to begin in: of version 2, and systemd's own beside it."""
    systemds = CGROUPS / "systemd"
    return [Path(unified()), *([systemds] if systemds.is_dir() else [])]


def _ready(parent: int) -> int:
    """The process ID of the systemd that this process has started, once it answers."""
    found: list[int] = []

    def ready() -> bool:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if not children:
            return False
        found[:] = map(int, children)
        asked = ("nsenter", f"--target={found[0]}", "--all", "systemctl", "is-system-running")
        return b"running" in subprocess.run(asked, capture_output=True, check=False).stdout

    assert wait_until(ready, _PATIENCE), "systemd has not started"
    return found[0]


def _removed(top: Path) -> bool:
    """Removes a cgroup with all below it, as far as their processes have ended."""
    for path in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
        with suppress(OSError):
            path.rmdir()
    with suppress(OSError):
        top.rmdir()
    return not top.exists()
