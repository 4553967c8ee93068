"""The record on disk: what an agent before this one may have handed out, as JSON in one file.

An agent may be killed just after an Allocate. So what is offered is on disk before it is offered,
and the next agent counts it as held (`Ledger.with_predecessor`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from npu_agent import files, typedjson
from npu_agent.core.claim import is_uid
from npu_agent.core.ledger import (
    Allocation,
    DeviceName,
    Ledger,
    OrphanedPod,
    PreparedClaim,
    PublishedCard,
)
from npu_agent.logs import Reporter, logger
from npu_agent.threads import DaemonThread

log = logger(__name__)

RECORD = ".npu-agent.ledger.json"
"""In the plugin directory. The kubelet removes sockets there and nothing else."""

_LARGEST = 16 << 20
"""Bytes that are read of it: it has some 600 for each device."""
_READING = 5.0
_TRY_AGAIN = 5.0
"""Seconds until a record that could not be written is tried again; another one immediately."""

_UNREADABLE = DeviceName("", "")
"""The name in place of a device for `Ledger.unreadable`."""

_Key = Annotated[str, msgspec.Meta(pattern=":")]
_Core = Annotated[int, msgspec.Meta(ge=0, lt=1024)]


class _Cores(msgspec.Struct, array_like=True):
    first: _Core
    last: _Core

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise ValueError(f"cores {self.first} to {self.last}")


class _Footprint(msgspec.Struct):
    keys: frozenset[_Key]
    cores: _Cores
    nodes: frozenset[str]


class _Device(msgspec.Struct):
    resource: str
    device: str
    footprints: tuple[_Footprint, ...]
    pod_uids: frozenset[str] = msgspec.field(name="podUIDs")
    since: ClassVar[float] = 0.0
    """Not written: it is of a clock that starts with the node."""


class _ClaimDevice(msgspec.Struct):
    request: str
    pool: str
    device: str
    admin: bool
    footprint: _Footprint


class _Claim(msgspec.Struct, kw_only=True):
    driver: str
    uid: str
    namespace: str
    name: str
    pods: tuple[str, ...]
    pod_uids: tuple[str, ...] = msgspec.field(name="podUIDs")
    joined: bool
    devices: tuple[_ClaimDevice, ...]


class _Orphan(msgspec.Struct, rename="camel"):
    by: str
    by_claim: bool
    footprints: tuple[_Footprint, ...]
    since: ClassVar[float] = 0.0


class _Published(msgspec.Struct):
    driver: str
    keys: frozenset[str]


class _Record(msgspec.Struct):
    version: Literal[1]
    devices: list[_Device]
    claims: list[_Claim]
    orphans: dict[str, _Orphan]
    cards: dict[str, frozenset[str]]
    published: dict[str, _Published]


# Between these types and those of `core.ledger`, by the names of their fields.
_converted = partial(msgspec.convert, from_attributes=True)


def encode(ledger: Ledger) -> bytes:
    """The record of a ledger: the same bytes for what is the same to the next agent."""
    allocations = dict(ledger.for_successor().allocations)
    if ledger.unreadable:
        allocations[_UNREADABLE] = ledger.unreadable
    record = _Record(
        version=1,
        devices=[
            _Device(*name, _converted(held.footprints, tuple[_Footprint, ...]), held.pod_uids)
            for name, held in sorted(allocations.items())
        ],
        cards=dict(ledger.cards),
        claims=[_converted(claim, _Claim) for _, claim in sorted(ledger.prepared.items())],
        orphans={uid: _converted(one, _Orphan) for uid, one in ledger.orphans.items()},
        published={id_: _converted(one, _Published) for id_, one in ledger.published.items()},
    )
    return msgspec.json.encode(record, order="deterministic") + b"\n"


def recover(ledger: Ledger, record: bytes | None, now: float) -> Ledger:
    """The ledger of an agent that finds this record; None: there was none."""
    if record is None:
        return ledger
    try:
        before = _decoded(record)
    except ValueError:
        return ledger.with_unreadable_record(now)
    return ledger.with_predecessor(before, now)


def _decoded(record: bytes) -> Ledger:
    found = typedjson.decode(record, _Record)
    allocations = {
        DeviceName(one.resource, one.device): _converted(one, Allocation) for one in found.devices
    }
    unreadable = allocations.pop(_UNREADABLE, None)
    for one in found.claims:
        if not is_uid(one.uid):  # it becomes part of a path
            raise ValueError(f"a claim with the UID {one.uid!r}")
    return Ledger(
        allocations=allocations,
        unreadable=unreadable,
        prepared={one.uid: _converted(one, PreparedClaim) for one in found.claims},
        orphans={uid: _converted(one, OrphanedPod) for uid, one in found.orphans.items()},
        cards=found.cards,
        published={id_: _converted(one, PublishedCard) for id_, one in found.published.items()},
    )


def read_record(directory: Path) -> bytes | None:
    """The record; None: there is none; empty: it cannot be read. May block."""
    try:
        return files.content(directory / RECORD, _LARGEST, follow=False)
    except OSError:
        return b""


class RecordFile:
    """The record in the plugin directory, as this agent reads and writes it."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self.on_disk: bytes | None = None
        """What this agent has read or written last; None: nothing, or unknown."""
        self._directory = directory
        self._path = directory / RECORD
        self._clock = clock
        self._failed: tuple[bytes, float] | None = None
        self._reporter = Reporter(log, "the record of who holds what cannot be written")

    @property
    def error(self) -> str | None:
        """Why it cannot be written; None while nothing is wrong."""
        return self._reporter.reason

    async def read(self) -> bytes | None:
        """As `read_record`; raises TimeoutError after 5 s."""
        thread = DaemonThread("npu-record", linger=0)
        self.on_disk = await thread.call(lambda: read_record(self._directory), deadline=_READING)
        return self.on_disk

    def try_now(self) -> None:
        """The next `write` tries a record again that has just failed."""
        self._failed = None

    async def write(self, record: bytes) -> None:
        if record == self.on_disk:
            self._reporter.works()
            return
        if self._failed and self._failed[0] == record and self._clock() < self._failed[1]:
            return
        try:
            await files.replace(self._path, record, durable=True)
        except OSError as error:
            self.on_disk = None  # it may come to its end later
            self._failed = record, self._clock() + _TRY_AGAIN
            self._reporter.failed(f"{self._path}: {error.strerror or error}")
        else:
            self.on_disk = record
            self._reporter.works()

    async def remove(self) -> None:
        with contextlib.suppress(OSError):
            await files.replace(self._path, None)
