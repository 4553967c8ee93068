"""Which agent serves the node's devices, and how it hands them over to the next one.

The kubelet lets anyone register a resource again, and drops the newer of two registrations when the
older one's stream ends (k8s.io/kubernetes, device manager, `runClient`). Two agents would take it
from each other for ever, or hand out the same cards under two names. So only the holder of the lock
(`npu_agent.kubelet.lock`) serves. All sessions and drivers of an agent share one `Ownership`.

The protocol:

1. The owner has the lock, and has signed the file.
2. Each other agent stands by: it tries to lock the byte NEXT. The one that gets it is the next in
   line.
3. The next in line locks the byte REGISTERS too, and tries to take the lock.
4. An owner that ends and finds REGISTERS locked signs again, with `ends`, and goes on serving.
5. Then the next in line registers with the kubelet, which needs up to a second to find a DRA
   driver, and unlocks REGISTERS. No other agent registers: the kubelet's calls to it would wait for
   one that may never own the node.
6. The owner ends once REGISTERS is free, or after 6 s. It removes the file, and its lock with it.
7. The next in line takes the lock, frees both bytes and serves: it is the owner.
8. If it hangs, the lock stays free. After 8 s any agent that stands by takes it.

`_Step` is where a session is in that; start reading at `Ownership.held`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from npu_agent import files
from npu_agent.kubelet.lock import LockByte, LockFile
from npu_agent.logs import logger

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
    """If the lock stays free this long, the next in line hangs. Longer than to register early."""
    settle: float = 0.02
    """From the end of the owner before us to our turn: a kubelet that has not put its stream away
    yet would take our registration for it and drop it."""
    hand_over: float = HAND_OVER


class _Step(enum.Enum):
    """Where a session is that needs the node, in steps of the protocol."""

    STANDBY = enum.auto()
    """Another agent is the next in line (2)."""
    NEXT = enum.auto()
    """This agent is the next in line, and the owner does not end yet (3)."""
    HAND_OVER = enum.auto()
    """This agent is the next in line, and the owner ends (5)."""
    OWNER = enum.auto()
    """The node is this agent's (7)."""


async def _nothing() -> None:
    pass


@dataclass(eq=False)
class _Waiter:
    """A session or driver that needs the node."""

    waiting: Callable[[str | None], None]
    register: Callable[[], Awaitable[None]]
    free_since: float | None = None
    """Since when the lock was free at each try while another agent was the next in line."""


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
        self._lock = LockFile(directory)
        self._lost = lost
        self._users = 0
        self._held: tuple[int, int] | None = None
        """Identity of the file that was last locked."""
        self._logged_owner: str | None = None
        """The owner that is waited for."""
        self._unregistered: set[_Waiter] = set()
        """Those of our users that wait and have not registered."""

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
        self._lock.open_current()
        self._users += 1
        try:
            await self._until_owned(_Waiter(waiting, register))
            if not self._lock.signed_since:
                self._lock.sign()
            # Others open another file, if this one is gone.
            mine = self._held = self._lock.identity()
            try:
                yield lambda: not files.gone(self._lock.path, mine)
            finally:
                # Unless another part of the agent holds the file that came after it.
                if mine == self._held and files.gone(self._lock.path, mine):
                    self._lost()
        finally:
            self._users -= 1
            if not self._users:
                self._lost()
                self._lock.close()

    async def hand_over(self) -> None:
        """Waits, if another agent is the next in line, until it is registered (4 and 6)."""
        if not self._lock.is_ours or not self._lock.is_byte_locked(LockByte.REGISTERS):
            return
        self._lock.sign(ends=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.hand_over):
                while self._lock.is_byte_locked(LockByte.REGISTERS):  # noqa: ASYNC110
                    await asyncio.sleep(self._timing.try_every)

    async def _until_owned(self, waiter: _Waiter) -> None:
        waits = self._step(waiter) is not _Step.OWNER
        if waits:
            await self._stand_by(waiter)

        for byte in LockByte:
            self._lock.lock_byte(byte, on=False)
        waiter.waiting(None)

        if waits:
            if self._logged_owner is not None:
                log.info("taking over", owner=self._logged_owner)
            self._logged_owner = None
            await asyncio.sleep(self._timing.settle)

    async def _stand_by(self, waiter: _Waiter) -> None:
        """Waits until the lock is ours, and registers when the owner is about to end."""
        self._unregistered.add(waiter)
        try:
            while (step := self._step(waiter)) is not _Step.OWNER:
                self._report_owner(waiter)
                match step:
                    case _Step.STANDBY:
                        await asyncio.sleep(self._timing.stand_by)
                    case _Step.NEXT:
                        self._lock_registers()
                        await asyncio.sleep(self._timing.stand_by)
                    case _Step.HAND_OVER:
                        await self._register_once(waiter)
                        self._lock_registers()
                        await asyncio.sleep(self._timing.try_every)
        finally:
            self._unregistered.discard(waiter)

    def _step(self, waiter: _Waiter) -> _Step:
        """Tries to lock what it may, and returns where that leads."""
        if self._lock.is_ours or self._lock.lock_byte(LockByte.NEXT):
            waiter.free_since = None
            if self._lock.take():
                return _Step.OWNER
            return _Step.HAND_OVER if self._lock.owner().ends else _Step.NEXT

        if self._next_hangs(waiter) and self._lock.take():
            return _Step.OWNER
        return _Step.STANDBY

    def _next_hangs(self, waiter: _Waiter) -> bool:
        """Whether the lock has been free for longer than the next in line takes (8)."""
        if not self._lock.is_free():
            waiter.free_since = None
            return False
        now = asyncio.get_running_loop().time()
        if waiter.free_since is None:
            waiter.free_since = now
        return now - waiter.free_since > self._timing.free

    def _report_owner(self, waiter: _Waiter) -> None:
        owner = str(self._lock.owner())
        if owner != self._logged_owner:
            self._logged_owner = owner
            log.info("another agent serves this node; waiting for it to end", owner=owner)
        waiter.waiting(owner)

    async def _register_once(self, waiter: _Waiter) -> None:
        if waiter in self._unregistered:
            await waiter.register()
            self._unregistered.discard(waiter)

    def _lock_registers(self) -> None:
        """An owner that ends waits for all of our users."""
        self._lock.lock_byte(LockByte.REGISTERS, on=bool(self._unregistered))
