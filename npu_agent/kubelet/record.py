"""The record on disk: possible grants of the previous agent, as JSON in one file.

An agent may be killed just after an Allocate. So what is offered is on disk before it is offered,
and the next agent counts it as held (`Ledger.with_predecessor`).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

import msgspec

from npu_agent import files, typedjson
from npu_agent.core.ledger import (
    Allocation,
    DeviceName,
    Footprint,
    Ledger,
    OrphanedPod,
    PreparedClaim,
    PublishedCard,
)
from npu_agent.core.pool import is_uid
from npu_agent.logs import Reporter, logger

log = logger(__name__)

RECORD = ".npu-agent.ledger.json"
"""In the plugin directory. The kubelet removes sockets there and nothing else."""

_LARGEST = 16 << 20
"""Bytes that are read of it: it has some 400 for each device."""


class _Record(msgspec.Struct):
    """The parts of a ledger that the next agent needs, in the ledger's own types.

    An agent of another release has to read it after an upgrade and after a rollback: fields may
    come, with a default, and go. A new version is for what an earlier agent would misread, and its
    agent reads the last version's too (tests/kubelet/golden/record-2.json). No release ever wrote
    version 1, so it is not read.
    """

    version: Literal[2]
    allocations: list[tuple[DeviceName, tuple[Footprint, ...], frozenset[str]]]
    """Each with its footprints and the UIDs of its Pods."""
    unreadable: bool = False
    prepared: dict[str, PreparedClaim] = {}
    orphans: dict[str, OrphanedPod] = {}
    cards: dict[str, frozenset[str]] = {}
    published: dict[str, PublishedCard] = {}


def encode(ledger: Ledger) -> bytes:
    """Encodes a ledger; the same bytes for what is the same to the next agent."""
    left = ledger.for_successor()
    record = _Record(
        version=2,
        allocations=[
            (name, held.footprints, held.pod_uids)
            for name, held in sorted(left.allocations.items())
        ],
        unreadable=left.unreadable is not None,
        prepared=dict(left.prepared),
        orphans=dict(left.orphans),
        cards=dict(left.cards),
        published=dict(left.published),
    )
    return msgspec.json.encode(record, order="deterministic") + b"\n"


def recover(ledger: Ledger, record: bytes | None, now: float) -> Ledger:
    """Returns the ledger of an agent that finds this record; None: there was none."""
    if record is None:
        return ledger
    try:
        before = _decoded(record)
    except ValueError:
        return ledger.with_unreadable_record(now)
    return ledger.with_predecessor(before, now)


def _decoded(record: bytes) -> Ledger:
    decoded = typedjson.decode(record, _Record)
    for uid in decoded.prepared:
        if not is_uid(uid):  # it becomes part of a path
            raise ValueError(f"a claim with the UID {uid!r}")
    ledger = Ledger(
        allocations={
            name: Allocation(footprints=footprints, pod_uids=uids, since=0.0)
            for name, footprints, uids in decoded.allocations
        },
        prepared=decoded.prepared,
        orphans=decoded.orphans,
        cards=decoded.cards,
        published=decoded.published,
    )
    return ledger.with_unreadable_record(0.0) if decoded.unreadable else ledger


def read_record(directory: Path) -> bytes | None:
    """The record; None: there is none; empty: it cannot be read. May block."""
    try:
        return files.content(directory / RECORD, _LARGEST, follow=False)
    except OSError:
        return b""


class RecordFile:
    """The record in the plugin directory, as this agent reads and writes it."""

    def __init__(self, directory: Path) -> None:
        self.on_disk: bytes | None = None
        """The bytes that this agent read or wrote last; None: nothing, or unknown."""
        self.path = directory / RECORD
        self._reporter = Reporter(log, "cannot write the record of allocations")

    @property
    def error(self) -> str | None:
        """Why it cannot be written; None while nothing is wrong."""
        return self._reporter.reason

    async def read(self) -> bytes | None:
        """Reads the record as `read_record` does; raises TimeoutError after 5 s."""
        try:
            self.on_disk = await files.read(self.path, _LARGEST, follow=False)
        except FileNotFoundError:
            self.on_disk = None
        except TimeoutError:
            raise
        except OSError:
            self.on_disk = b""
        return self.on_disk

    async def write(self, record: bytes) -> None:
        if record != self.on_disk:
            self.on_disk = None  # a write that fails, or is given up, may come to its end later
            try:
                await files.replace(self.path, record, durable=True)
            except OSError as error:
                self._reporter.failed(f"{self.path}: {error.strerror or error}")
                return
            self.on_disk = record
        self._reporter.works()

    async def remove(self) -> None:
        with contextlib.suppress(OSError):
            await files.replace(self.path, None)
