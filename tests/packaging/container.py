"""A root directory run by runc as k8s/daemonset.yaml has it: nothing writable, no capability."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import DEADLINE, Process


@dataclass(frozen=True, kw_only=True)
class Container:
    """How to run programs in it. Its network is the host's, so that tests can ask its pages.

    Attributes:
        root: what is its /.
        writable: what is mounted: the path inside, and the host's.
        readable: the same, read-only.
        temporary: options of the tmpfs that is its /tmp; "" for none.
        environment: all that programs find there.
    """

    root: Path
    writable: Mapping[str, Path] = field(default_factory=dict)
    readable: Mapping[str, Path] = field(default_factory=dict)
    temporary: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def ran(self, *command: str | Path) -> tuple[int, str, str]:
        """Runs a program to its end: exit code, stdout, stderr."""
        with self._bundle(command) as runc:
            done = subprocess.run(runc, capture_output=True, text=True, timeout=DEADLINE)
        return done.returncode, done.stdout, done.stderr

    @contextmanager
    def started(self, *command: str | Path) -> Iterator[Process]:
        """Starts a program; kills it in the end if it still runs. runc hands signals on."""
        with self._bundle(command) as runc:
            popen = subprocess.Popen(
                runc, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            try:
                yield Process(popen)
            finally:
                if popen.poll() is None:
                    subprocess.run([*runc[:3], "delete", "--force", runc[-1]], capture_output=True)
                popen.kill()
                popen.communicate()

    @contextmanager
    def _bundle(self, command: Sequence[str | Path]) -> Iterator[list[str]]:
        with tempfile.TemporaryDirectory(prefix="npu-runc-") as directory:
            Path(directory, "config.json").write_text(
                json.dumps(self._config(command)), encoding="utf-8"
            )
            name = f"npu-agent-{uuid.uuid4().hex[:12]}"
            yield ["runc", "--root", f"{directory}/state", "run", "--bundle", directory, name]

    def _config(self, command: Sequence[str | Path]) -> dict[str, Any]:
        """As in the OCI runtime specification."""
        mounts = [_mount("proc", "/proc", "proc"), _mount("sysfs", "/sys", "sysfs", "ro")]
        mounts += [_mount("tmpfs", "/dev", "tmpfs", "mode=755", "size=64k")]
        if self.temporary:
            mounts += [_mount("tmpfs", "/tmp", "tmpfs", *self.temporary.split(","))]
        for paths, options in ((self.writable, ["rbind"]), (self.readable, ["rbind", "ro"])):
            mounts += [
                _mount(str(host), inside, "bind", *options) for inside, host in paths.items()
            ]
        nothing: dict[str, list[str]] = {
            kind: [] for kind in ("bounding", "effective", "permitted")
        }
        linux: dict[str, Any] = {
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]
        }
        return {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                "user": {"uid": 0, "gid": 0},
                "args": [str(word) for word in command],
                "env": [f"{name}={value}" for name, value in self.environment.items()],
                "cwd": "/",
                "capabilities": nothing,
                "noNewPrivileges": True,
            },
            "root": {"path": str(self.root), "readonly": True},
            "mounts": mounts,
            "linux": linux,
        }


def _mount(source: str, destination: str, kind: str, *options: str) -> dict[str, Any]:
    return {"source": source, "destination": destination, "type": kind, "options": [*options]}


def install(root: Path, *paths: Path) -> None:
    """Copies files of this machine to the same place below `root`; a link as what it leads to."""
    for path in paths:
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
