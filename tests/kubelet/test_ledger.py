"""The keeper of the ledger; what outputs do with it is in tests/outputs."""

from __future__ import annotations

from pathlib import Path

from npu_agent.core.ledger import UNSEEN
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
