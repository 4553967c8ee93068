"""The lock in the kubelet's directory, and the state of what is registered with the kubelet.

The holder of the lock alone serves the node's devices.

Why a lock: the kubelet lets anyone register a resource again, and drops the newer of two
registrations when the older one's stream ends (k8s.io/kubernetes, device manager, `runClient`). Two
agents would take it from each other for ever, or hand out the same cards under two names. The
kernel releases the lock of a dead process.

A kubelet needs up to a second to find a DRA driver. So an owner that ends signs that it does, and
waits for the next one to register (`Ownership.hand_over`), which has a byte of the file locked
until then. Of several that wait, the one with the lock on another byte is the next. Earlier than
that none registers: if two agents were installed, each claim would wait for one that never owns the
node. If the next one hangs, another one takes the lock that stays free.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from npu_agent import __version__, files, typedjson
from npu_agent.core.state import SessionPhase, SessionStatus
from npu_agent.feed import Feed
from npu_agent.logs import Reporter, logger
from npu_agent.text import one_line
from npu_agent.ticks import stamp

log = logger(__name__)

HAND_OVER = 6.0
"""Seconds for which an owner that ends waits for the next one to be registered. The kubelet polls
for new sockets once a second (k8s.io/kubernetes, pluginmanager, `loopSleepDuration`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of an ownership, in seconds."""

    stand_by: float = 0.25
    """Between tries to own the node, until its owner is about to end."""
    try_every: float = 0.02
    """Between these, and between checks that the next owner is registered."""
    free: float = 8.0
    """For which the lock is free before one takes it that is not the next, which then hangs: to
    register early takes less."""
    settle: float = 0.02
    """From the end of the owner before us to our turn: a kubelet that has not put its stream away
    yet would take our registration for it and drop it."""
    hand_over: float = HAND_OVER


def lock_path(directory: Path) -> Path:
    """Returns the path of the lock. The kubelet removes sockets only; plain files stay."""
    return directory / ".npu-agent.lock"


async def _nothing() -> None:
    pass


class RegistrationTracker:
    """The `status` of what is registered at the kubelet."""

    def __init__(self, resource: str) -> None:
        self.status: Feed[SessionStatus] = Feed(
            SessionStatus(resource=resource, phase=SessionPhase.NO_CARDS)
        )
        self._reporter = Reporter(log, "not registered; retrying", resource=resource)

    def becomes(self, phase: SessionPhase, reason: str = "", times: int | None = None) -> None:
        """`times` counts the registrations so far; None: as many as before."""
        now = self.status.value
        self.status.publish(
            replace(
                now,
                phase=phase,
                reason=reason,
                registrations=now.registrations if times is None else times,
                since=now.since if phase is now.phase else time.monotonic(),
            )
        )

    def waits_for(self, owner: str | None) -> None:
        """`owner` serves the node; None: it is ours now."""
        if owner is None:
            self.becomes(SessionPhase.REGISTERING)
        else:
            self.becomes(SessionPhase.STANDBY, f"served by {owner}")

    def fails(self, reason: str, phase: SessionPhase = SessionPhase.BLOCKED) -> None:
        """Something keeps it from being served; logged once."""
        self.becomes(phase, reason)
        self._reporter.failed(reason)

    def registered(self, times: int) -> None:
        self._reporter.works()
        self.becomes(SessionPhase.REGISTERED, times=times)


class Ownership:
    """The right of one agent to serve its node's devices; shared by its sessions."""

    def __init__(
        self,
        directory: Path,
        lost: Callable[[], None] = lambda: None,
        timing: Timing = Timing(),
    ) -> None:
        """Not owned yet; `lost` is called when another agent may have the node that was ours."""
        self._timing = timing
        self._path = lock_path(directory)
        self._lost = lost
        self._descriptor = -1
        self._users = 0
        self._held: tuple[int, int] | None = None
        self._ours_since = ""
        """When the file was signed; "": not yet."""
        self._owner: str | None = None
        self._unregistered = 0
        """How many of our users wait and have not registered."""
        self._owns = False

    @contextlib.asynccontextmanager
    async def held(
        self,
        waiting: Callable[[str | None], None],
        register: Callable[[], Awaitable[None]] = _nothing,
    ) -> AsyncIterator[Callable[[], bool]]:
        """Owns the node's devices while the context is open; waits for them without a limit.

        Yields a function that returns whether the lock still counts: the directory may be wiped.

        Args:
            waiting: called with the present owner, and with None once the node is ours.
            register: awaited once when the present owner is about to end, with its own deadline.

        Raises:
            OSError: the lock cannot be made.
        """
        self._open()
        self._users += 1
        try:
            waited = await self._until_owned(waiting, register)
            waiting(None)
            if waited:
                if self._owner is not None:
                    log.info("taking over", owner=self._owner)
                self._owner = None
                await asyncio.sleep(self._timing.settle)
            if not self._ours_since:
                self._sign()
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
                self._release()

    async def hand_over(self) -> None:
        """Waits, if another agent stands by, until it is registered."""
        if not self._owns or not _registers(self._descriptor):
            return
        self._sign(ends=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.hand_over):
                while _registers(self._descriptor):  # noqa: ASYNC110 (of another process)
                    await asyncio.sleep(self._timing.try_every)

    async def _until_owned(
        self,
        waiting: Callable[[str | None], None],
        register: Callable[[], Awaitable[None]],
    ) -> bool:
        """Returns whether it had to wait."""
        waited = registered = False
        now = asyncio.get_running_loop().time
        free_at = math.inf
        try:
            while True:
                following = self._owns or _lock_byte(self._descriptor, _NEXT)
                if following or not _is_free(self._descriptor):
                    free_at = math.inf
                free_at = min(free_at, now())
                if (following or now() - free_at > self._timing.free) and self._owned():
                    break
                if not waited:
                    waited = True
                    self._unregistered += 1
                owner = read_owner(self._descriptor)
                if str(owner) != self._owner:
                    self._owner = str(owner)
                    log.info(
                        "another agent serves this node; waiting for it to end", owner=self._owner
                    )
                waiting(self._owner)
                if following:
                    if owner.ends and not registered:
                        await register()
                        registered = True
                        self._unregistered -= 1
                    _lock_byte(self._descriptor, _REGISTERS, on=self._unregistered > 0)
                quick = following and owner.ends
                await asyncio.sleep(self._timing.try_every if quick else self._timing.stand_by)
        finally:
            if waited and not registered:
                self._unregistered -= 1

        self._owns = True
        for byte in (_NEXT, _REGISTERS):
            _lock_byte(self._descriptor, byte, on=False)
        return waited

    def _open(self) -> None:
        """Opens, or makes, the file that is there now."""
        if self._descriptor != -1 and _is_at(self._path, self._descriptor):
            return
        fresh = files.regular(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        if self._descriptor != -1:
            os.close(self._descriptor)

        self._descriptor = fresh
        self._ours_since = ""

    def _owned(self) -> bool:
        """Whether the lock is ours on the file that is there: an owner removes its own."""
        while _locked(self._descriptor):
            if _is_at(self._path, self._descriptor):
                return True
            self._open()
        return False

    def _release(self) -> None:
        if _locked(self._descriptor) and _is_at(self._path, self._descriptor):
            with contextlib.suppress(OSError):  # a directory that is read-only now keeps it
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1
        self._owns = False

    def _sign(self, *, ends: bool = False) -> None:
        """Writes who we are: once for each lock file, and once more when the agent ends."""
        now = stamp()
        self._ours_since = self._ours_since or now
        who = Owner(
            version=__version__,
            host=socket.gethostname(),  # in a Pod this is the Pod's name
            pid=os.getpid(),
            since=self._ours_since,
            ends=ends,
        )
        signature = msgspec.json.encode(who) + b"\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, signature, 0)
            os.ftruncate(self._descriptor, len(signature))


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(descriptor: int) -> bool:
    """Whether no other agent has the lock; not to be asked by its owner, who would lose it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


_NEXT = 1
"""The byte of the lock file that the next owner has locked."""
_REGISTERS = 2
"""The byte that the next owner has locked until it registers."""
_BYTE = "hhqqi"


def _lock_byte(descriptor: int, byte: int, *, on: bool = True) -> bool:
    """Locks or unlocks a byte; returns whether no other agent has it."""
    kind = fcntl.F_WRLCK if on else fcntl.F_UNLCK
    try:
        lock = struct.pack(_BYTE, kind, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
    except BlockingIOError:
        return False
    except OSError:  # a file system without such locks: then there is no order
        return True
    return True


def _registers(descriptor: int) -> bool:
    asked = struct.pack(_BYTE, fcntl.F_WRLCK, os.SEEK_SET, _REGISTERS, 1, 0)
    try:
        lock = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    except OSError:
        return False
    return bool(struct.unpack(_BYTE, lock)[0] != fcntl.F_UNLCK)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return files.identity(path) == _identity(descriptor)
    except OSError:
        return False


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


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


def read_owner(descriptor: int) -> Owner:
    try:
        return typedjson.decode(os.pread(descriptor, 4096, 0), Owner)
    except (OSError, ValueError):
        return Owner()
