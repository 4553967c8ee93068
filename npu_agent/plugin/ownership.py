"""One agent a node serves a resource: whoever holds the lock beside the kubelet's socket.

Why a lock: the kubelet lets anyone register a resource again, and drops the newer of two
registrations when the older one's stream ends (k8s.io/kubernetes, device manager, `runClient`). Two
agents would take it from each other for ever. With the lock the second one waits, says who owns
the resource, and takes over within a blink of the first one's end, however that came: the kernel
lets go of a dead process's lock. So a rolling update with maxSurge has no gap worth the name.
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
from pathlib import Path

from npu_agent import __version__
from npu_agent.logs import logger

log = logger(__name__)

_TRY_EVERY = 0.1
"""Seconds. A try is one system call; the gap at a hand-over is half of this on average."""
_SETTLE = 0.1
"""Seconds from the end of the owner before us to our turn. A kubelet that has not put the owner's
stream away yet would take our registration for it and drop it."""


def lock_path(directory: Path, resource: str) -> Path:
    """Where the lock of a resource is. The kubelet sweeps sockets only; plain files stay."""
    return directory / f".npu-agent.{resource.replace('/', '_')}.lock"


@contextlib.asynccontextmanager
async def owned(
    directory: Path, resource: str, waiting: Callable[[str | None], None]
) -> AsyncIterator[Callable[[], bool]]:
    """Holds the resource while the context is open; waits for it as long as it takes.

    `waiting` is told who owns the resource meanwhile, and None once it is ours. Yields a function
    that tells whether the lock still counts: somebody may have wiped the directory.

    Raises:
        OSError: the lock cannot be made in `directory`.
    """
    path = lock_path(directory, resource)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        owner: str | None = None
        while not _locked(descriptor):
            found = _owner(descriptor)
            if found != owner:
                owner = found
                log.warning(
                    "another agent serves this resource: waiting for it to end",
                    resource=resource,
                    owner=owner,
                )
            waiting(owner)
            await asyncio.sleep(_TRY_EVERY)
        waiting(None)
        if owner is not None:
            log.info("taking over", resource=resource, owner=owner)
            await asyncio.sleep(_SETTLE)
        _sign(descriptor)
        yield lambda: _is_at(path, descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def _sign(descriptor: int) -> None:
    """Writes who we are, for those who wait and for people."""
    who = {
        "host": socket.gethostname(),  # in a Pod this is the Pod's name
        "pid": os.getpid(),
        "version": __version__,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(who).encode() + b"\n", 0)


def _owner(descriptor: int) -> str:
    try:
        who = json.loads(os.pread(descriptor, 4096, 0))
        return (
            f"npu-agent {who['version']} on {who['host']}, pid {who['pid']}, since {who['since']}"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "an agent that has not said its name"
