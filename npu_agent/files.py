"""The agent's own regular files, by aiofiles: read with a bound, replaced as a whole.

Each operation has a deadline, and each file a daemon thread while there is something to do for it
(`threads.DaemonThread`): a file system that hangs holds up neither other files nor the exit.
aiofiles takes such an executor for all but the `async with` of an open file, whose close goes to
asyncio's default executor; so files are closed by hand here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import aiofiles
import aiofiles.os

from npu_agent.threads import DaemonThread, within

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncBufferedIOBase, AsyncBufferedReader

T = TypeVar("T")

_DEADLINE = 5.0
"""Seconds."""

SIMULATION = ".npu-simulator"
"""The directory that marks the root of a simulated tree, where plain files may stand for device
nodes."""


class IrregularError(OSError):
    """A directory, a pipe or a device where a regular file should be."""


class _Threads(defaultdict[Path, DaemonThread]):
    """One for each file that was ever used: the agent has five."""

    def __missing__(self, path: Path) -> DaemonThread:
        self[path] = thread = DaemonThread(f"npu-file-{path.name}")
        return thread


_threads = _Threads()


async def read(path: Path, most: int, *, deadline: float = _DEADLINE) -> bytes:
    """The first `most` bytes of a regular file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: `path` cannot be one.
    """
    async with within(deadline):
        return await _read(path, most)


async def replace(
    path: Path,
    content: bytes | None,
    *,
    make_directory: bool = True,
    deadline: float = _DEADLINE,
) -> None:
    """Puts `content` in place, or removes the file (None); leaves it alone if it is so already.

    The new file takes the old one's place in one step, so that nobody reads half of one.

    Raises:
        OSError: the directory cannot be made or written; a FileNotFoundError if there is none, and
            `make_directory` is False.
    """
    async with within(deadline):
        if content is None:
            with contextlib.suppress(FileNotFoundError):
                await aiofiles.os.unlink(path, executor=_threads[path])
            return
        with contextlib.suppress(FileNotFoundError):
            if await _read(path, len(content) + 1) == content:
                return
        if make_directory:
            await aiofiles.os.makedirs(path.parent, exist_ok=True, executor=_threads[path])
        await _replace(path, content)


def regular(path: str, flags: int) -> int:
    """Opens a regular file, as an `opener` for `open`; new ones are for everybody to read.

    Raises:
        OSError: it cannot be opened; an IrregularError if it is something else.
    """
    # A named pipe without a writer would hold up a plain open() for ever.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise IrregularError(errno.EINVAL, f"this is {what}", path)
    if flags & os.O_CREAT:
        os.fchmod(descriptor, 0o644)  # whatever the umask: readers are not root
    return descriptor


def content(path: Path, most: int) -> bytes | None:
    """The first `most` bytes of a regular file; None if there is no such file. May block.

    Raises:
        OSError: it cannot be read; an IrregularError if it is something else.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read(most)
    except FileNotFoundError:
        return None


async def _read(path: Path, most: int) -> bytes:
    thread = _threads[path]
    file = await aiofiles.open(path, "rb", opener=regular, executor=thread)
    return await _closing(file, file.read(most), thread)


async def _replace(path: Path, content: bytes) -> None:
    thread = _threads[path]
    # Hidden, and with an ending of its own: some readers take every *.json of a directory. Random,
    # as the two agents of a rolling update may both be process 1 of their containers.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        file = await aiofiles.open(unfinished, "xb", opener=regular, executor=thread)
        await _closing(file, file.write(content), thread)
        await aiofiles.os.replace(unfinished, path, executor=thread)
    except BaseException:
        thread.submit(unfinished.unlink, missing_ok=True)
        raise


async def _closing(
    file: AsyncBufferedIOBase | AsyncBufferedReader, operation: Awaitable[T], thread: DaemonThread
) -> T:
    """Awaits an operation on an open file and closes it."""
    try:
        result = await operation
        await file.close()
    except BaseException:
        thread.submit(file.raw.close)  # in its turn: whoever gave up on a hang does not wait for it
        raise
    return result


def is_device(path: Path, root: Path) -> bool:
    """Whether this is a character device, or what stands for one if `root` is a simulated tree.

    Raises:
        OSError: there is nothing, or this user may not see it.
    """
    mode = path.stat().st_mode
    return stat.S_ISCHR(mode) or (stat.S_ISREG(mode) and (root / SIMULATION).is_dir())
