"""One agent serves a node's devices: whoever holds the lock beside the kubelet's socket.

Why a lock: the kubelet lets anyone register a resource again, and drops the newer of two
registrations when the older one's stream ends (k8s.io/kubernetes, device manager, `runClient`). Two
agents would take it from each other for ever; and under two resource names they would hand out
the same cards twice. With the lock the second one waits, says who owns the node, and takes over
within milliseconds of the first one's end, however it ended: the kernel releases the lock of a
dead process. So a rolling update with maxSurge has no gap worth the name.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from npu_agent import __version__, files
from npu_agent.logs import logger
from npu_agent.text import one_line

log = logger(__name__)

_TRY_EVERY = 0.02
"""Seconds. A try is one system call, and only an agent that stands by makes them."""
_SETTLE = 0.02
"""Seconds from the end of the owner before us to our turn. A kubelet that has not put the owner's
stream away yet would take our registration for it and drop it."""


def lock_path(directory: Path) -> Path:
    """Where the lock is. The kubelet sweeps sockets only; plain files stay."""
    return directory / ".npu-agent.lock"


class Ownership:
    """One agent's claim to serve the devices of its node; all its sessions share it."""

    def __init__(self, directory: Path, lost: Callable[[], None] = lambda: None) -> None:
        """Nobody's yet.

        Args:
            directory: the kubelet's device-plugins directory.
            lost: called when the node was this agent's, and another one may have it now.
        """
        self._path = lock_path(directory)
        self._lost = lost
        self._descriptor = -1
        self._users = 0
        self._held: tuple[int, int] | None = None
        """Which lock file was held last."""
        self._owner: str | None = None
        """Whom we wait for."""

    @contextlib.asynccontextmanager
    async def held(
        self, waiting: Callable[[str | None], None]
    ) -> AsyncIterator[Callable[[], bool]]:
        """Owns the node's devices while the context is open; waits for it as long as it takes.

        `waiting` is called with the present owner, and with None once they are ours. Yields a
        function that returns whether the lock still counts: the directory may have been wiped.

        Raises:
            OSError: the lock cannot be made.
        """
        self._open()
        self._users += 1
        try:
            waited = False
            while not self._owned():
                waited = True
                self._wait_for(str(owner_of(self._descriptor)))
                waiting(self._owner)
                await asyncio.sleep(_TRY_EVERY)
            waiting(None)
            if waited:
                if self._owner is not None:
                    log.info("taking over", owner=self._owner)
                self._owner = None
                await asyncio.sleep(_SETTLE)
            _sign(self._descriptor)
            # Others open another file, if this one is gone.
            mine = self._held = _identity(self._descriptor)
            try:
                yield lambda: not files.gone(self._path, mine)
            finally:
                # Unless another part of the agent holds the file that came after it.
                if mine == self._held and files.gone(self._path, mine):
                    self._lost()
        finally:
            self._users -= 1
            if not self._users:
                self._lost()
                self._let_go()

    def _open(self) -> None:
        """Opens the file that is there now, if we have not; it is made if there is none."""
        if self._descriptor != -1 and _is_at(self._path, self._descriptor):
            return
        fresh = files.regular(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        if self._descriptor != -1:
            os.close(self._descriptor)
        self._descriptor = fresh

    def _owned(self) -> bool:
        """Whether the lock is ours now.

        It counts only on the file that is there: an owner takes its file away when it ends.
        """
        while _locked(self._descriptor):
            if _is_at(self._path, self._descriptor):
                return True
            self._open()
        return False

    def _let_go(self) -> None:
        """Ends the claim; nothing is left on the disk of a node that has no agent any more."""
        if _locked(self._descriptor) and _is_at(self._path, self._descriptor):
            with contextlib.suppress(OSError):  # a directory that is read-only now keeps it
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1

    def _wait_for(self, owner: str) -> None:
        if owner != self._owner:
            self._owner = owner
            log.warning("another agent serves this node: waiting for it to end", owner=owner)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return files.identity(path) == _identity(descriptor)
    except OSError:
        return False


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _sign(descriptor: int) -> None:
    """Writes who we are, for those who wait and for people; a disk may be full of other things."""
    who = {
        "host": socket.gethostname(),  # in a Pod this is the Pod's name
        "pid": os.getpid(),
        "version": __version__,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(who).encode() + b"\n", 0)


_SIGNED = ("version", "host", "pid", "since")


@dataclass(frozen=True, slots=True)
class Owner:
    """The agent that holds the lock, as it signed the file; for people by ``str``."""

    host: str | None = None
    """In a Pod this is the Pod's name; None: it has not signed, or not as we do."""
    words: str = "an agent that has not signed its lock"

    def __str__(self) -> str:
        return self.words


def owner_of(descriptor: int) -> Owner:
    """Who signed the lock file; `descriptor` is the file's, open for reading."""
    try:
        who = json.loads(os.pread(descriptor, 4096, 0))
        version, host, pid, since = (one_line(who[key], 64) for key in _SIGNED)
        return Owner(host, f"npu-agent {version} on {host}, pid {pid}, since {since}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Owner()
