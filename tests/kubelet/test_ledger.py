"""The keeper of the ledger; what outputs do with it is in tests/outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_agent.core.ledger import UNSEEN, Assignment, Ledger
from npu_agent.kubelet.ledger import OLD_RECORD, RECORD, left_behind
from npu_agent.kubelet.podresources import Holdings
from tests.outputs.deviceplugin.helpers import devices
from tests.outputs.dra.room import NPU, Room, result


async def test_only_an_answer_ends_a_hold(tmp_path: Path) -> None:
    """A kubelet that does not answer says nothing of who holds what."""
    room = Room(tmp_path)
    await room.owned()
    room.keeper.grant(NPU, [devices(*room.cards)[0]])
    room.now += UNSEEN
    for _ in range(3):
        room.says(error="no answer within 5 s")
    assert room.keeper.states.value.holds.keys() == {(NPU, "WARBOY-0")}
    for _ in range(3):
        room.says()  # it may have been restarted, and not know its Pods yet
    assert room.keeper.states.value.holds.keys() == {(NPU, "WARBOY-0")}
    room.now += 30.0
    for _ in range(2):
        room.says()
    assert room.keeper.states.value.holds == {}


async def test_what_a_claim_holds_is_no_reason_to_withhold_it_from_the_scheduler(
    tmp_path: Path,
) -> None:
    """Which knows of it: a taint would keep an administrator's Pod out."""
    room = Room(tmp_path)
    await room.owned("WARBOY-1")
    room.claim("c", result("npu-warboy-0"))
    await room.prepared()
    held = room.keeper.held_by_containers({"npu-warboy-0", "npu-warboy-1"})
    claimed, used = devices(*room.cards)
    assert held(claimed) is None
    assert "Pod team/train still holds its cores" in str(held(used))


async def test_pod_resources_can_have_no_news_only_if_nobody_holds_anything(tmp_path: Path) -> None:
    room = Room(tmp_path)
    assert not room.keeper.no_news()  # another agent may hand out what it likes
    await room.owned()
    assert room.keeper.no_news()

    room.keeper.grant(NPU, [devices(*room.cards)[0]])
    assert not room.keeper.no_news()
    room.now += UNSEEN
    room.says(error="no answer within 5 s")
    assert not room.keeper.no_news()
    for _ in range(3):
        room.now += UNSEEN
        room.says()
    assert room.keeper.no_news()

    # By another plugin, which may have the same cards.
    held = Assignment("team", "train", "main", "vendor.example/npu", "WARBOY-1")
    room.kubelet.holdings.publish(Holdings(assignments=(held,), asked_at=room.now))
    assert not room.keeper.no_news()
    for _ in range(2):
        room.now += UNSEEN
        room.says()
    assert room.keeper.no_news()

    room.claim("c", result("npu-warboy-0"))
    await room.prepared()
    assert not room.keeper.no_news()


@pytest.mark.parametrize("name", [RECORD, OLD_RECORD])
def test_no_more_of_a_record_is_read_than_one_can_have(tmp_path: Path, name: str) -> None:
    """A sparse file of 1 TiB takes no room on the disk."""
    with (tmp_path / name).open("wb") as record:
        record.truncate(1 << 40)
    found = left_behind(tmp_path)
    assert found is not None
    assert len(found) < 1 << 25


def test_a_link_in_place_of_the_record_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("{}")
    (tmp_path / RECORD).symlink_to(tmp_path / "foreign")
    assert left_behind(tmp_path) == b""


@pytest.mark.parametrize("record", [b"[" * 100_000, b'{"a":' * 100_000, b"\0" * 1000])
def test_a_record_that_is_none_has_everything_held(record: bytes) -> None:
    assert Ledger().recovered(record, 0.0).unsure
