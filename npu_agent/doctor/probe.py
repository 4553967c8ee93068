"""Probes that cannot hang: on a daemon thread each, with a deadline."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from npu_agent.core.trouble import TroubleKind, kind_of
from npu_agent.doctor.check import Unseen
from npu_agent.files import content
from npu_agent.text import reason
from npu_agent.threads import DaemonThread

T = TypeVar("T")

DEADLINE = 5.0
"""Seconds. What is probed here answers in milliseconds, or there is something wrong with it."""


async def probe(function: Callable[[], T]) -> T:
    """What `function` returns.

    Raises:
        Unseen: it raises OSError, or does not return in time.
    """
    with unseen():
        return await DaemonThread("npu-doctor").call(function, deadline=DEADLINE)


@contextmanager
def unseen() -> Iterator[None]:
    """What is not read, for whatever reason, or not in time, is Unseen."""
    try:
        yield
    except TimeoutError as error:
        why = error.strerror or f"no answer within {DEADLINE:g} s"
        raise Unseen(why, TroubleKind.TIMEOUT) from error
    except OSError as error:
        raise Unseen(reason(error), kind_of(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """A directory, as this process sees it."""

    path: Path
    owner: str = ""
    """``uid 0, gid 0, mode 0750``; empty where there is none."""
    there: bool = True
    readable: bool = True
    writable: bool = True
    read_only: bool = False
    """Whether its file system is mounted read-only here."""


def directory(path: Path) -> Directory:
    """Probes one; may block. Where `path` is missing or no directory, it is not `there`.

    Raises:
        OSError: not even that can be seen.
    """
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        info = None
    if info is None or not stat.S_ISDIR(info.st_mode):
        return Directory(path=path, there=False, readable=False, writable=False)
    mode = stat.S_IMODE(info.st_mode)
    return Directory(
        path=path,
        owner=f"uid {info.st_uid}, gid {info.st_gid}, mode {mode:04o}",
        readable=os.access(path, os.R_OK | os.X_OK, effective_ids=True),
        writable=os.access(path, os.W_OK | os.X_OK, effective_ids=True),
        read_only=bool(os.statvfs(path).f_flag & os.ST_RDONLY),
    )


@dataclass(frozen=True, slots=True)
class Process:
    """A process on this host, as /proc shows it."""

    pid: int
    command: tuple[str, ...]
    """The program and its arguments; cut where they are long."""

    def __str__(self) -> str:
        return f"pid {self.pid}: {' '.join(self.command)}"

    @property
    def runs_an_agent(self) -> bool:
        """Whether it is ``npu-agent run``, however that was started."""
        names = ("npu-agent", "npu_agent")
        return "run" in self.command and any(n in word for word in self.command for n in names)


def process(proc: Path, pid: int) -> Process | None:
    """The process of this number; None if there is none, or it is in another PID namespace (0).

    Raises:
        OSError: this user may not see it.
    """
    words = content(proc / str(pid) / "cmdline", 256) if pid else None
    if not words:
        return None
    return Process(pid, tuple(words.decode(errors="replace").strip("\0").split("\0")))
