"""The agent's own regular files: read with a bound, replaced as a whole.

By aiofiles, whose executor is a daemon thread that each file has while there is something to do
(`threads.DaemonThread`): a file system that hangs delays neither other files nor the exit. Calls
for one file are made in order, each with a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from pathlib import Path
from weakref import WeakValueDictionary

import aiofiles.os

from npu_agent.threads import DaemonThread, within

_DEADLINE = 5.0
"""Seconds."""

SIMULATION = ".npu-simulator"
"""The directory that marks the root of a simulated tree, where plain files may stand for device
nodes."""


class IrregularError(OSError):
    """A directory, a pipe or a device where a regular file should be."""


class LinkError(IrregularError):
    """A symbolic link where none is followed: what it leads to is not ours."""


_threads: WeakValueDictionary[Path, DaemonThread] = WeakValueDictionary()
"""For each file that is used, or whose thread runs: each claim has a file of its own, so that
there are any number of them in an agent's life."""


async def read(path: Path, most: int, *, follow: bool = True, deadline: float = _DEADLINE) -> bytes:
    """The first `most` bytes of a regular file; with `follow` also of one that a link leads to.

    Raises:
        OSError: it cannot be read, or is not a regular file. TimeoutError after `deadline` seconds.
        ValueError: there can be no file of this name.
    """
    async with within(deadline):
        return await _read(path, most, follow=follow, executor=_thread_of(path))


async def replace(
    path: Path,
    content: bytes | None,
    *,
    make_directory: bool = True,
    durable: bool = False,
    deadline: float = _DEADLINE,
) -> bool:
    """Puts `content` in place in one step, or removes the file (None); returns whether it changed.

    A `durable` file is on the disk before it takes the old one's place: after a power cut there is
    the old one or the new one, and never an empty one.

    Raises:
        OSError: the directory cannot be made or written; a FileNotFoundError if there is none, and
            `make_directory` is False; a TimeoutError after `deadline` seconds.
    """
    thread = _thread_of(path)
    given_up = threading.Event()
    async with within(deadline):
        if content is None:
            return await _remove(path, executor=thread)
        try:
            return await _write(
                path, content, given_up, make=make_directory, durable=durable, executor=thread
            )
        finally:
            given_up.set()


async def matching(directory: Path, pattern: str) -> set[str]:
    """The names in a directory that match a glob pattern; raises OSError as `read`."""
    return await _thread_of(directory).call(
        lambda: {path.name for path in directory.glob(pattern)}, deadline=_DEADLINE
    )


def _content(path: Path, most: int, *, follow: bool) -> bytes:
    flags = os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW
    with os.fdopen(regular(path, flags), "rb") as file:
        return file.read(most)


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _replaced(
    path: Path, content: bytes, given_up: threading.Event, *, make: bool, durable: bool
) -> bool:
    # A link is replaced, and not what it leads to; so is a pipe, and a file that was made
    # unreadable. A directory stays, and is reported below.
    with contextlib.suppress(IrregularError, PermissionError, FileNotFoundError):
        if _content(path, len(content) + 1, follow=False) == content:
            return False
    if make and not path.parent.is_dir():
        _make(path.parent)
    # Hidden, and without an ending: some readers take every *.json of a directory. Random, as the
    # two agents of a rolling update may both be process 1 of their containers.
    temporary = path.with_name(f".npu-agent.{secrets.token_hex(8)}")
    try:
        descriptor = regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(descriptor)
        if not given_up.is_set():  # else another agent may have written the file since
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _make(directory: Path) -> None:
    """Makes a directory and those above it, as open as `regular` makes a file."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was first
            path.mkdir()
            path.chmod(0o755)


# Each is one call of the thread: a caller that gives up between two would leave a file open.
_read = aiofiles.os.wrap(_content)
_remove = aiofiles.os.wrap(_removed)
_write = aiofiles.os.wrap(_replaced)


def _thread_of(path: Path) -> DaemonThread:
    return _threads.setdefault(path, DaemonThread())


def regular(path: Path, flags: int) -> int:
    """Opens a regular file, a new one with mode 0644; returns its descriptor.

    Raises:
        OSError: an IrregularError if it is something else, a LinkError for a symbolic link with
            O_NOFOLLOW.
    """
    try:
        # A named pipe without a writer would block a plain open() for ever.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if flags & os.O_NOFOLLOW and error.errno == errno.ELOOP:
            raise LinkError(errno.EINVAL, "this is a symbolic link", str(path)) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise IrregularError(errno.EINVAL, f"this is {what}", str(path))
    if flags & os.O_CREAT:
        os.fchmod(descriptor, 0o644)  # also with a strict umask: readers are not root
    return descriptor


def content(path: Path, most: int, *, follow: bool = True) -> bytes | None:
    """Reads like `read`; None if there is no such file. May block."""
    try:
        return _content(path, most, follow=follow)
    except FileNotFoundError:
        return None


def identity(path: Path) -> tuple[int, int]:
    """The device and inode of a file, which tell it from another one of its name."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def gone(path: Path, known: tuple[int, int] | None) -> bool:
    """Whether the file whose `identity` is `known` is no longer there, or another one is.

    Not where that cannot be found out: what cannot be seen may work as before.
    """
    try:
        return identity(path) != known
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def is_device(path: Path, root: Path) -> bool:
    """Whether this is a character device, or what stands for one in a simulated tree."""
    mode = path.stat().st_mode
    return stat.S_ISCHR(mode) or (stat.S_ISREG(mode) and (root / SIMULATION).is_dir())
