"""The lock file in the kubelet's directory: an agent's own lock, two locked bytes, a signature.

`LockFile.take` gets the lock, which the kernel releases with a dead process. What the bytes and the
signature are for is the protocol of `npu_agent.kubelet.ownership`; nothing here waits.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import socket
import struct
from pathlib import Path

import msgspec

from npu_agent import __version__, files, typedjson
from npu_agent.text import one_line
from npu_agent.ticks import stamp

_RANGE = "hhqqi"
"""`struct flock`: kind of the lock, whence, start, length, process."""


class LockByte(enum.IntEnum):
    """A byte of the file, by its offset, that one agent can lock apart from the file."""

    NEXT = 1
    """Locked by the agent that is the next in line."""
    REGISTERS = 2
    """Locked by it until it has registered with the kubelet."""


class Owner(msgspec.Struct, frozen=True):
    """The agent that signed the lock file; for people by ``str``."""

    host: str | None = None
    """The Pod's name in a Pod; None: it has not signed, or not as we do."""
    version: str = ""
    pid: int = 0
    since: str = ""
    ends: bool = False
    """Whether it ends, and waits until the next one is registered."""

    def __str__(self) -> str:
        if self.host is None:
            return "an agent that has not signed its lock"
        words = f"npu-agent {self.version} on {self.host}, pid {self.pid}, since {self.since}"
        return one_line(words)


def lock_path(directory: Path) -> Path:
    """Returns the path of the lock. The kubelet removes sockets only; plain files stay."""
    return directory / ".npu-agent.lock"


def read_owner(descriptor: int) -> Owner:
    try:
        return typedjson.decode(os.pread(descriptor, 4096, 0), Owner)
    except (OSError, ValueError):
        return Owner()


class LockFile:
    """This agent's open lock file. All locks in it belong to the agent, not to one session."""

    def __init__(self, directory: Path) -> None:
        """Makes no file yet."""
        self.path = lock_path(directory)
        self.is_ours = False
        """Whether `take` got the lock of the file that is open."""
        self.signed_since = ""
        """When this agent first signed the file that is open; "": not yet."""
        self._descriptor = -1

    def open_current(self) -> None:
        """Opens, or makes, the file that is there now; nothing of another one is locked any more.

        Raises:
            OSError: it cannot be made.
        """
        if self._is_there():
            return
        fresh = files.regular(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        if self._descriptor != -1:
            os.close(self._descriptor)

        self._descriptor = fresh
        self.is_ours = False
        self.signed_since = ""

    def close(self) -> None:
        """Ends all locks; removes the file if no other agent has its lock."""
        if self._lock() and self._is_there():
            with contextlib.suppress(OSError):  # a directory that is read-only now keeps it
                self.path.unlink()

        os.close(self._descriptor)
        self._descriptor = -1
        self.is_ours = False

    def take(self) -> bool:
        """Returns whether the lock is ours on the file that is there: an owner removes its own.

        Raises:
            OSError: the file is gone, and cannot be made again.
        """
        while self._lock():
            if self._is_there():
                self.is_ours = True
                return True
            self.open_current()
        return False

    def is_free(self) -> bool:
        """Whether no other agent has the lock; not to be asked by its owner, who would lose it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def lock_byte(self, byte: LockByte, *, on: bool = True) -> bool:
        """Locks or unlocks a byte; returns whether no other agent has it."""
        kind = fcntl.F_WRLCK if on else fcntl.F_UNLCK
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _range(kind, byte))
        except BlockingIOError:
            return False
        except OSError:  # a file system without such locks: then there is no order
            return True
        return True

    def is_byte_locked(self, byte: LockByte) -> bool:
        """Whether another agent has the byte."""
        try:
            answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, byte))
        except OSError:
            return False
        return bool(struct.unpack(_RANGE, answer)[0] != fcntl.F_UNLCK)

    def owner(self) -> Owner:
        """Who signed the file last."""
        return read_owner(self._descriptor)

    def sign(self, *, ends: bool = False) -> None:
        """Writes who we are, and whether this agent ends; a full disk leaves it unsigned."""
        self.signed_since = self.signed_since or stamp()
        owner = Owner(
            version=__version__,
            host=socket.gethostname(),  # in a Pod this is the Pod's name
            pid=os.getpid(),
            since=self.signed_since,
            ends=ends,
        )
        signature = msgspec.json.encode(owner) + b"\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, signature, 0)
            os.ftruncate(self._descriptor, len(signature))

    def identity(self) -> tuple[int, int]:
        """The device and inode of the open file."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _is_there(self) -> bool:
        """Whether the open file still has the path."""
        try:
            return files.identity(self.path) == self.identity()
        except OSError:
            return False


def _range(kind: int, byte: LockByte) -> bytes:
    return struct.pack(_RANGE, kind, os.SEEK_SET, byte, 1, 0)
