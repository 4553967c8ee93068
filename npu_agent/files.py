"""The agent's own regular files: read with a bound, replaced as a whole.

Calls for one file are made in order, each with a deadline, on a daemon thread that the file has
while there is something to do (`threads.DaemonThread`): a file system that hangs delays neither
other files nor the exit. asyncio's default executor, and with it aiofiles, would.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from npu_agent.threads import DaemonThread

_DEADLINE = 5.0
"""Seconds."""

SOCKET_PATH_MAX = 107
"""Bytes in the path of a Unix socket: sun_path holds 108, the last one is NUL (unix(7))."""

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
    thread = _thread_of(path)
    found = await thread.call(partial(content, path, most, follow=follow), deadline=deadline)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return found


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
    abandoned = threading.Event()
    change = partial(_replace, path, content, abandoned, directory=make_directory, durable=durable)
    try:
        return await _thread_of(path).call(change, deadline=deadline)
    except BaseException:
        abandoned.set()
        raise


def _thread_of(path: Path) -> DaemonThread:
    return _threads.setdefault(path, DaemonThread("npu-file"))


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
    flags = os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW
    try:
        descriptor = regular(path, flags)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most)


def identity(path: Path) -> tuple[int, int]:
    """The device and inode of a file, which tell it from another one of its name."""
    found = path.lstat()
    return found.st_dev, found.st_ino


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


def _replace(
    path: Path, new: bytes | None, abandoned: threading.Event, *, directory: bool, durable: bool
) -> bool:
    """Replaces like `replace`, unless it is abandoned before the last step. May block."""
    if new is None:
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True
    # A link is replaced, and not what it leads to; so is a pipe, and a file that was made
    # unreadable. A directory stays, and is reported below.
    with contextlib.suppress(IrregularError, PermissionError):
        if content(path, len(new) + 1, follow=False) == new:
            return False
    if directory:
        path.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and without an ending: some readers take every *.json of a directory. Random, as the
    # two agents of a rolling update may both be process 1 of their containers.
    temporary = path.with_name(f".npu-agent.{secrets.token_hex(8)}")
    descriptor = regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            if file.write(new) != len(new):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if durable:
                os.fsync(descriptor)
        if not abandoned.is_set():
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return True
