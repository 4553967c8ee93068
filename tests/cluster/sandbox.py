"""A machine within the machine: namespaces of its own for one node, and the processes in them.

The mount, network and PID namespaces belong together: when the first process (sandbox.sh) is
killed, the kernel kills every other process in them, pods included, and mounts, interfaces and
firewall rules end with the last one. So nothing can be left over but files and empty cgroups, and
what a crashed run left behind is found by its record in `RECORDS` and ended in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .cache import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RECORDS = Path("/run/npu-agent-cluster")
CGROUPS = Path("/sys/fs/cgroup")
REPLACED = ("/dev", "/etc", "/run", "/var/lib", "/var/log", "/var/run")
"""The host's directories that mean something else inside: no working directory can be there."""
DEVICES = ("full", "kmsg", "null", "random", "tty", "urandom", "zero")
LINKS = {
    "fd": "/proc/self/fd",
    "ptmx": "pts/ptmx",
    **{name: f"fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))},
}
OWN = ("config", "etc", "etc.work", "kubelet", "root", "run", "sysctl", "varlib", "varlog")
"""What is made in the working directory, and deleted; beside it there is `logs`, which stays."""
MAX_DIRECTORY = 60
"""Longest working directory, in bytes: sockets below it must fit the 107 of a Unix address."""


class SandboxError(RuntimeError):
    pass


@dataclass(frozen=True)
class Process:
    """A process, told from a later one of the same number by its start time in clock ticks."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> Process:
        stat = _stat(pid)
        if stat is None:
            raise SandboxError(f"process {pid} has ended")
        return Process(pid, int(stat[19]))

    @property
    def alive(self) -> bool:
        """Whether it has not ended; a zombie has."""
        stat = _stat(self.pid)
        return stat is not None and stat[0] not in "ZX" and int(stat[19]) == self.started

    def signal(self, number: int) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> bool:
        return wait_until(lambda: not self.alive, timeout)


@dataclass(frozen=True)
class Record:
    """What is needed to end a sandbox without having started it.

    Attributes:
        directory: its working directory.
        outer: the `unshare` process, whose end the kernel passes on to the first process inside.
        owner: the process that wanted it, or None if it is to outlive that.
    """

    directory: str
    outer: Process
    owner: Process | None

    @property
    def path(self) -> Path:
        return RECORDS / f"{sandbox_id(Path(self.directory))}.json"

    @property
    def wanted(self) -> bool:
        """Whether it lives, and so does the process that wanted it."""
        return self.outer.alive and (self.owner is None or self.owner.alive)

    def save(self) -> None:
        RECORDS.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")
        unfinished.rename(self.path)

    @staticmethod
    def load(path: Path) -> Record:
        data = json.loads(path.read_text(encoding="utf-8"))
        owner = data["owner"] and Process(**data["owner"])
        return Record(data["directory"], Process(**data["outer"]), owner)


class Sandbox:
    """One node's namespaces.

    Attributes:
        directory: the working directory. In it `root` is the host tree for simulated drivers,
            `root/dev` is /dev, `kubelet` is /var/lib/kubelet, `run` is /run, and so on
            (sandbox.sh); `logs` has one file per process.
        init: the first process in the namespaces.
        cgroup: name of the cgroup, in every hierarchy, that is there for the node's pods.
    """

    def __init__(self, directory: Path, init: Process) -> None:
        self.directory = directory
        self.init = init
        self.cgroup = f"npu-agent-{sandbox_id(directory)}"
        self._outer: subprocess.Popen[bytes] | None = None
        self._processes: dict[Process, subprocess.Popen[bytes]] = {}

    @classmethod
    def start(
        cls, directory: Path, node_address: str, service_address: str = "", *, keep: bool = False
    ) -> Sandbox:
        """Make the namespaces; first end what crashed runs left, here or anywhere.

        Args:
            directory: absolute and short; it may exist, but what an earlier
                sandbox left in it is deleted.
            node_address: the node's own IPv4 address.
            service_address: the API server's service address; empty: it runs elsewhere.
            keep: the sandbox outlives the process that started it.
        """
        _check(directory)
        with locked("sandboxes"):
            for path in RECORDS.glob("*.json"):
                record = Record.load(path)
                if not record.wanted:
                    _end(record)
                elif record.directory == str(directory):
                    raise SandboxError(f"a cluster runs in {directory} already")
            _make_files(directory)
            outer = _unshare(directory, node_address, service_address)
            owner = None if keep else Process.of(os.getpid())
            record = Record(str(directory), Process.of(outer.pid), owner)
            record.save()
        ready = directory / "ready"
        wait_until(lambda: ready.exists() or outer.poll() is not None, 10)
        if not ready.exists():
            with locked("sandboxes"):
                _end(record)
            outer.wait()
            reason = (directory / "logs" / "sandbox.log").read_text(encoding="utf-8").strip()
            raise SandboxError(f"cannot make namespaces (needs root): {reason or 'no answer'}")
        sandbox = cls(directory, _child_of(outer.pid))
        sandbox._outer = outer
        _make_cgroups(sandbox.cgroup)
        return sandbox

    @classmethod
    def attach(cls, directory: Path) -> Sandbox:
        """The sandbox that another process started in this directory."""
        path = RECORDS / f"{sandbox_id(directory)}.json"
        if not path.exists():
            raise SandboxError(f"no cluster runs in {directory}")
        record = Record.load(path)
        if not record.outer.alive:
            raise SandboxError(f"the cluster in {directory} has died")
        return cls(directory, _child_of(record.outer.pid))

    def stop(self) -> None:
        """End every process in the namespaces and delete everything but the logs."""
        path = RECORDS / f"{sandbox_id(self.directory)}.json"
        with locked("sandboxes"):
            if path.exists():
                _end(Record.load(path))
        for popen in (*self._processes.values(), self._outer):
            if popen is not None:
                popen.kill()
                popen.wait()
        self._processes.clear()

    def connect(self, other: Sandbox) -> None:
        """Lay a cable between two nodes: each asks there for addresses that it does not have."""
        # Not from inside: the other's first process has no number in this one's PID namespace.
        lay = ["ip", "link", "add", "cable", "type", "veth"]
        lay += ["peer", "name", "cable", "netns", f"{other.init.pid}"]
        subprocess.run(["nsenter", f"--net=/proc/{self.init.pid}/ns/net", *lay], check=True)
        for sandbox in (self, other):
            plug = sandbox.command("ip", "link", "set", "dev", "cable", "master", "node0", "up")
            subprocess.run(plug, check=True)

    def command(self, *command: str) -> list[str]:
        namespaces = ("--mount", "--net", "--pid")
        return ["nsenter", "--target", str(self.init.pid), *namespaces, "--", *command]

    def spawn(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> Process:
        """Start a program inside, its output appended to `logs/NAME.log`."""
        with (self.directory / "logs" / f"{name}.log").open("ab") as log:
            popen = subprocess.Popen(
                self.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        try:
            process = _child_of(popen.pid)
        except SandboxError:
            popen.kill()
            popen.wait()
            raise SandboxError(f"{name} ended at once: {self.tail(name)}") from None
        self._processes[process] = popen
        return process

    def signal(self, process: Process, number: int) -> None:
        """Send a signal to a process that `spawn` started."""
        process.signal(number)
        popen = self._processes.get(process)
        if number == signal.SIGCONT and popen is not None:
            popen.send_signal(number)  # nsenter stops itself when its child is stopped

    def terminate(self, process: Process, timeout: float) -> None:
        """TERM, up to `timeout` seconds of waiting, KILL."""
        process.signal(signal.SIGTERM)
        process.wait(timeout)
        self.kill(process)

    def kill(self, process: Process) -> None:
        process.signal(signal.SIGKILL)
        if not process.wait(10):
            raise SandboxError(f"cannot kill process {process.pid}")
        popen = self._processes.pop(process, None)
        if popen is not None:
            popen.kill()  # nsenter: it has no child any more, but may itself be stopped
            popen.wait()

    def listening(self, port: int) -> bool:
        for table in ("tcp", "tcp6"):
            lines = (
                Path(f"/proc/{self.init.pid}/net/{table}")
                .read_text(encoding="utf-8")
                .splitlines()[1:]
            )
            fields = [line.split() for line in lines]
            if any(f[1].endswith(f":{port:04X}") and f[3] == "0A" for f in fields):
                return True
        return False

    def tail(self, name: str, lines: int = 15) -> str:
        path = self.directory / "logs" / f"{name}.log"
        text = path.read_text(errors="replace", encoding="utf-8") if path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def sandbox_id(directory: Path) -> str:
    return hashlib.sha256(str(directory).encode()).hexdigest()[:8]


def wait_until(condition: Callable[[], object], timeout: float, interval: float = 0.02) -> bool:
    """Poll until `condition()` is true; returns False after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def _check(directory: Path) -> None:
    if os.geteuid() != 0:
        raise SandboxError("a cluster needs root: it makes namespaces and mounts")
    if not directory.is_absolute() or directory != directory.resolve():
        raise SandboxError(f"{directory}: give an absolute path without links")
    if len(os.fsencode(directory)) > MAX_DIRECTORY:
        raise SandboxError(f"{directory}: longer than {MAX_DIRECTORY} bytes, too long for sockets")
    for taken in REPLACED:
        if directory.is_relative_to(taken):
            raise SandboxError(f"{directory}: {taken} is another directory inside the cluster")
    directory.mkdir(parents=True, exist_ok=True)
    if os.statvfs(directory).f_flag & os.ST_NODEV:
        raise SandboxError(f"{directory} is on a file system without device nodes (nodev)")


def _end(record: Record) -> None:
    """End a sandbox, whoever started it: processes, cgroups, files but the logs, the record."""
    directory = Path(record.directory)
    if record.outer.alive:
        inner = _children(record.outer.pid)
        # Init is gone only after all others in its PID namespace were waited for. An `nsenter` that
        # stopped itself, since its child was stopped, waits for none.
        outside = [process for init in inner for process in _parents_outside(init.pid)]
        record.outer.signal(signal.SIGKILL)  # --kill-child takes the namespaces with it
        for process in (*outside, *inner, record.outer):
            process.signal(signal.SIGKILL)
            if not process.wait(10):
                raise SandboxError(f"cannot kill process {process.pid} of {directory}")
    _remove_cgroups(f"npu-agent-{sandbox_id(directory)}")
    _clear(directory)
    record.path.unlink(missing_ok=True)
    with suppress(OSError):
        RECORDS.rmdir()


def _make_files(directory: Path) -> None:
    _clear(directory)
    shutil.rmtree(directory / "logs", ignore_errors=True)
    for name in (*OWN, "logs"):
        (directory / name).mkdir()
    for name in ("root/dev/pts", "root/dev/shm", "root/sys", "run/lock", "varlib/kubelet"):
        (directory / name).mkdir(parents=True)
    _make_devices(directory / "root" / "dev")


def _unshare(directory: Path, *addresses: str) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("sandbox.sh")
    with (directory / "logs" / "sandbox.log").open("wb") as log:
        return subprocess.Popen(
            [
                *["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"],
                *["--mount-proc", "--propagation", "private"],
                *["sh", str(script), str(directory), *addresses],
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # An interrupted test run (Ctrl-C) still has a cluster to take down in order.
            start_new_session=True,
        )


def _clear(directory: Path) -> None:
    """Delete what a sandbox made, but not its logs. None of it can be a mount: those are inside."""
    for name in OWN:
        if (directory / name).exists():
            shutil.rmtree(directory / name)
    (directory / "ready").unlink(missing_ok=True)


def _make_devices(dev: Path) -> None:
    for name in DEVICES:
        status = Path("/dev", name).stat()
        os.mknod(dev / name, status.st_mode, status.st_rdev)
        (dev / name).chmod(status.st_mode & 0o777)  # mknod minds the umask
    for name, target in LINKS.items():
        (dev / name).symlink_to(target)


def _make_cgroups(name: str) -> None:
    if (CGROUPS / "cgroup.controllers").exists():
        (CGROUPS / name).mkdir(exist_ok=True)
        return
    for hierarchy in CGROUPS.iterdir():
        if hierarchy.is_dir() and not hierarchy.is_symlink():
            (hierarchy / name).mkdir(exist_ok=True)


def _remove_cgroups(name: str) -> None:
    tops = [path for path in (CGROUPS / name, *CGROUPS.glob(f"*/{name}")) if path.is_dir()]
    for top in tops:
        # Deepest first: only an empty cgroup can be removed, and the kernel empties a dead
        # process's shortly after it is gone.
        for path in sorted((p for p in (top, *top.rglob("*")) if p.is_dir()), reverse=True):
            if not wait_until(partial(_rmdir, path), 10):
                raise SandboxError(f"cgroup {path} does not get empty")


def _rmdir(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return False
    return True


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on: the second may contain blanks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _children(pid: int) -> list[Process]:
    # /proc/PID/task/TID/children would say it, but not every kernel has that file.
    children = []
    for entry in Path("/proc").iterdir():
        stat = _stat(int(entry.name)) if entry.name.isdigit() else None
        if stat is not None and int(stat[1]) == pid:
            children.append(Process(int(entry.name), int(stat[19])))
    return children


def _parents_outside(init: int) -> list[Process]:
    """The processes outside of a PID namespace that have children in it: `unshare`, `nsenter`."""

    def namespace(pid: int | str) -> str:
        try:
            return str(Path(f"/proc/{pid}/ns/pid").readlink())
        except OSError:  # it has ended
            return ""

    ours = namespace(init)
    inside = [entry.name for entry in Path("/proc").iterdir() if namespace(entry.name) == ours]
    # The children of an `nsenter` that was killed are those of the machine's first process.
    parents = {int(stat[1]) for pid in inside if (stat := _stat(int(pid)))} - {1}
    return [
        Process(pid, int(stat[19]))
        for pid in parents
        if namespace(pid) != ours and (stat := _stat(pid))
    ]


def _child_of(pid: int) -> Process:
    """The one child of `unshare` or `nsenter`: the program proper."""
    found: list[Process] = []

    def look() -> bool:
        found[:] = _children(pid)
        stat = _stat(pid)
        return bool(found) or stat is None or stat[0] == "Z"

    wait_until(look, 5, interval=0.005)
    if not found:
        raise SandboxError(f"process {pid} started nothing")
    return found[0]
