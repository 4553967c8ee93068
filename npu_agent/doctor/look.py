"""Looks that cannot hang: on a daemon thread each, with a deadline."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from npu_agent.doctor.check import Unseen
from npu_agent.inventory.reader import HungError, Reader
from npu_agent.simulator.tree import STATE_DIR

T = TypeVar("T")

DEADLINE = 5.0
"""Seconds. What is looked at here answers in milliseconds, or there is something wrong with it."""


async def look(function: Callable[[], T]) -> T | Unseen:
    """What `function` returns; Unseen if it raises OSError or does not come back in time."""
    with closing(Reader("npu-doctor")) as reader:
        return await seen(reader.call(function, deadline=DEADLINE))


async def seen(answer: Awaitable[T]) -> T | Unseen:
    """What is awaited; Unseen where that raises OSError or misses its deadline."""
    try:
        return await answer
    except (HungError, TimeoutError) as error:
        return Unseen(str(error) or f"no answer within {DEADLINE:g} s")
    except OSError as error:
        said = error.strerror or str(error)
        denied = error.errno in (errno.EACCES, errno.EPERM)
        return Unseen(f"{error.filename}: {said}" if error.filename else said, denied=denied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """A directory, as the process that asks sees it."""

    path: Path
    owner: str = ""
    """``uid 0, gid 0, mode 0750``; empty where there is none."""
    there: bool = True
    readable: bool = True
    writable: bool = True
    read_only: bool = False
    """Whether its file system is mounted read-only here."""


def directory(path: Path) -> Directory:
    """Looks at one; may block. `path` may be missing, or be no directory: then it is not there.

    Raises:
        OSError: it cannot even be told whether it is there.
    """
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Directory(path=path, there=False, readable=False, writable=False)
    if not stat.S_ISDIR(info.st_mode):
        return Directory(path=path, there=False, readable=False, writable=False)
    mode = stat.S_IMODE(info.st_mode)
    return Directory(
        path=path,
        owner=f"uid {info.st_uid}, gid {info.st_gid}, mode {mode:04o}",
        readable=os.access(path, os.R_OK | os.X_OK, effective_ids=True),
        writable=os.access(path, os.W_OK | os.X_OK, effective_ids=True),
        read_only=bool(os.statvfs(path).f_flag & os.ST_RDONLY),
    )


def plain_nodes(root: Path) -> bool:
    """Whether plain files may stand for device nodes: a simulated tree where root was missing."""
    return (root / STATE_DIR).is_dir()


def is_device(mode: int, *, plain: bool) -> bool:
    """Whether a file of this mode is a card's node, or with `plain` what stands for one."""
    return stat.S_ISCHR(mode) or (plain and stat.S_ISREG(mode))


def content(path: Path, most: int) -> bytes | None:
    """The first `most` bytes of a regular file; None if there is no such file. May block.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    try:
        # O_NONBLOCK: a named pipe without a writer would hold up a plain open() for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(most)
