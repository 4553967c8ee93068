"""The record on disk: it says the same when it is read again, and what is no record is doubted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_agent.core.hardware import CoreRange
from npu_agent.core.ledger import (
    Allocation,
    DeviceName,
    Footprint,
    Ledger,
    OrphanedPod,
    PreparedClaim,
    PreparedDevice,
    PublishedCard,
)
from npu_agent.kubelet.record import RECORD, encode, read_record, recover

NPU = "beta.furiosa.ai/npu"
UID = "0b1c6a4e-52f5-4a4e-9d5e-3d4f4b5c6d01"
KEYS = frozenset({"uuid:U0", "serial:S0"})
WHOLE = Footprint(KEYS, CoreRange(0, 1), frozenset({"npu0pe0", "npu0_mgmt"}))
PREPARED = PreparedDevice(request="npu", pool="node", device="npu-u0", footprint=WHOLE)
LEDGER = Ledger(
    offered={DeviceName(NPU, "U0"): WHOLE},
    allocations={
        DeviceName(NPU, "U1"): Allocation(footprints=(WHOLE,), since=1.0, pod_uids=frozenset({UID}))
    },
    prepared={
        UID: PreparedClaim(
            driver="npu.furiosa.ai",
            uid=UID,
            namespace="team",
            name="train",
            pods=("pod",),
            pod_uids=(UID,),
            joined=True,
            devices=(PREPARED,),
        )
    },
    orphans={UID: OrphanedPod(footprints=(WHOLE,), by="Pod team/old", by_claim=True, since=9.0)},
    cards={"U0": KEYS},
    published={"U0": PublishedCard("npu.furiosa.ai", KEYS)},
)
WRITTEN: dict[str, Any] = json.loads(encode(LEDGER))


def read(record: dict[str, Any]) -> Ledger:
    return recover(Ledger(), json.dumps(record).encode(), 5.0)


def test_a_record_is_read_as_it_was_written() -> None:
    assert read(WRITTEN) == Ledger().with_predecessor(LEDGER, 5.0)
    unreadable = Ledger().with_unreadable_record(1.0)
    assert recover(Ledger(), encode(unreadable), 5.0).unreadable
    assert encode(read(WRITTEN)) == encode(LEDGER)


def test_a_record_of_another_release_is_read() -> None:
    """The file is never renewed: what agents wrote with this version stays readable."""
    written = json.loads((Path(__file__).parent / "golden/record-2.json").read_bytes())
    for record in (written, WRITTEN | {"comes": {"with": "a later release"}}):
        assert read(record) == Ledger().with_predecessor(LEDGER, 5.0)
    with_fewer = {name: written[name] for name in ("version", "allocations")}
    assert read(with_fewer).allocations == read(written).allocations


def test_no_record_means_that_nothing_was_handed_out() -> None:
    assert recover(Ledger(), None, 0.0) == Ledger()


def _claim(uid: str = UID, **changed: object) -> bytes:
    return json.dumps(WRITTEN | {"prepared": {uid: WRITTEN["prepared"][UID] | changed}}).encode()


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"", b"{", b"[]", b'{"version": 1}', b"\xff", b"null", b"[" * 100_000, b"\0" * 1000),
        json.dumps(WRITTEN | {"version": 1}).encode(),
        json.dumps(WRITTEN | {"cards": {"U0": [1]}}).encode(),
        _claim(uid="../../etc"),  # it becomes part of a path
        _claim(pods="pod"),
    ],
)
def test_a_record_that_cannot_be_read_means_that_anything_may_be_held(damaged: bytes) -> None:
    found = recover(Ledger(), damaged, 100.0)
    assert found.unreadable
    for at in (100.0, 101.0):
        found = found.with_answer((), at, cards=(), resources=[NPU])
    assert not found.unreadable


def test_no_more_of_a_record_is_read_than_one_can_have(tmp_path: Path) -> None:
    """A sparse file of 1 TiB takes no room on the disk."""
    with (tmp_path / RECORD).open("wb") as record:
        record.truncate(1 << 40)
    found = read_record(tmp_path)
    assert found is not None
    assert len(found) < 1 << 25


def test_a_link_in_place_of_the_record_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("{}", encoding="utf-8")
    (tmp_path / RECORD).symlink_to(tmp_path / "foreign")
    assert read_record(tmp_path) == b""
