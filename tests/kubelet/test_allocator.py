"""The store of the ledger; what outputs do with it is in tests/outputs."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from npu_agent import files
from npu_agent.core.grant import Refusal, RefusalError
from npu_agent.core.hardware import Health, HealthState, Snapshot
from npu_agent.core.ledger import HOLDER_ENDS, UNSEEN, DeviceName, Ledger, footprint
from npu_agent.core.plan import holders
from npu_agent.kubelet.allocator import AllocatorTiming
from npu_agent.kubelet.record import RECORD, read_record, recover
from npu_agent.supervise import background
from tests.outputs.deviceplugin.helpers import devices, resources
from tests.outputs.dra import room as dra
from tests.outputs.dra.room import NPU, result
from tests.outputs.helpers import claim
from tests.until import first, until


class Room(dra.Room):
    """Its cards are listed by the device plugin."""

    listed = ("warboy",)


async def test_only_an_answer_ends_a_hold(tmp_path: Path) -> None:
    """A kubelet that does not answer, or has just started, says nothing of who holds what."""
    room = Room(tmp_path)
    await room.owned()
    await room.allocator.grant(NPU, [devices(*room.cards)[0]])
    room.now += UNSEEN
    room.allocator.kubelet_lost()
    for _ in range(3):
        room.says()
    assert room.allocator.states.value.allocations.keys() == {(NPU, "WARBOY-0")}
    for _ in range(3):
        room.says(error="no answer within 5 s")
    assert room.allocator.states.value.allocations.keys() == {(NPU, "WARBOY-0")}
    room.now += 30.0
    for _ in range(3):
        room.says()  # it may have been restarted, and not know its Pods yet
    assert room.allocator.states.value.allocations.keys() == {(NPU, "WARBOY-0")}
    room.now += 30.0
    for _ in range(2):
        room.says()
    assert room.allocator.states.value.allocations == {}


async def test_a_claims_device_is_not_withheld_from_the_scheduler(
    tmp_path: Path,
) -> None:
    """Which knows of it: a taint would keep an administrator's Pod out."""
    room = Room(tmp_path)
    await room.owned("WARBOY-1")
    room.claim("c", result("npu-warboy-0"))
    await room.prepared()
    here = room.allocator.facts()
    conflicts = here.ledger.conflicts(here.cards, without={"npu-warboy-0", "npu-warboy-1"})
    claimed, used = devices(*room.cards)
    assert conflicts.against(None, claimed) is None
    assert "Pod team/train still holds its cores" in str(conflicts.against(None, used))


TIMING = AllocatorTiming(last_answer=30.0, end=30.0)
STILL = "(not listed by the kubelet, but its containers still run)"


async def outlived(directory: Path, timing: AllocatorTiming = TIMING) -> Room:
    """A Pod has WARBOY-0, and the kubelet takes it for free while its containers run."""
    room = Room(directory)
    room.allocator_timing = timing
    room.start()
    await room.owned()
    room.kubelet.node.notes = {DeviceName(NPU, "WARBOY-0"): frozenset({"old"})}
    room.says("WARBOY-0")
    room.kubelet.node.alive = {"old"}
    return room


async def ends(room: Room, says: Callable[[Room], None] = Room.says) -> None:
    """The agent ends, and the kubelet answers once more; by default that nobody holds anything."""
    asked = room.kubelet.asked
    ending = asyncio.create_task(room.allocator.end())
    await until(lambda: room.kubelet.asked > asked)
    says(room)
    await ending


def the_same(room: Room) -> None:
    """The kubelet says what it said."""
    room.kubelet.holdings.publish(replace(room.kubelet.holdings.value, asked_at=room.now + 9))


def disowns(room: Room) -> None:
    room.allocator.disowned()


def fails(room: Room) -> None:
    health = Health(state=HealthState.UNHEALTHY, reason="the card does not answer", since=0.0)
    room.have(replace(room.cards[0], health=health), room.cards[1])


def cordons(room: Room) -> None:
    room.allocator.cordons.cards.publish({"WARBOY-0": "swap fan"})


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (disowns, "does not own the node"),
        (fails, "is unhealthy: the card does not answer"),
        (cordons, "is cordoned: swap fan"),
    ],
)
async def test_changes_while_a_grant_waits_count(
    tmp_path: Path, changes: Callable[[Room], None], refusal: str
) -> None:
    room = await outlived(tmp_path)
    granting = asyncio.create_task(room.allocator.grant(NPU, devices(*room.cards)[:1]))
    await until(lambda: room.allocator.states.value.orphans)
    changes(room)
    room.kubelet.node.alive = set()
    room.says()
    with pytest.raises(RefusalError, match=refusal):
        await granting


async def test_a_grant_waits_until_a_device_is_listed_as_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder has ended, and the list that says so waits for the disk."""
    room = await outlived(tmp_path)
    go_on = asyncio.Event()
    replace_file = files.replace

    async def slow(*arguments: Any, **options: Any) -> bool:
        await go_on.wait()
        return await replace_file(*arguments, **options)

    async with background(room.allocator.run()):
        granting = asyncio.create_task(room.allocator.grant(NPU, devices(*room.cards)[:1]))
        await first(room.allocator.devices[NPU], lambda listed: listed and not listed[0].healthy)
        monkeypatch.setattr(files, "replace", slow)
        room.kubelet.node.alive = set()
        room.says()
        await until(lambda: not room.allocator.states.value.orphans)
        assert not room.allocator.devices[NPU].value[0].healthy
        go_on.set()
        await granting


def disables(room: Room) -> None:
    room.wishes.publish(replace(room.wishes.value, disabled=frozenset({"npu0"})))


def cuts(room: Room) -> None:
    room.wishes.publish(replace(room.wishes.value, resources=resources(NPU, 1)))


def moves(room: Room) -> None:
    room.wishes.publish(replace(room.wishes.value, families=()))


@pytest.mark.parametrize("changes", [disables, cuts, moves])
async def test_a_grant_that_has_waited_is_of_devices_that_are_listed_then(
    tmp_path: Path, changes: Callable[[Room], None]
) -> None:
    room = await outlived(tmp_path)
    async with background(room.allocator.run()):
        granting = asyncio.create_task(room.allocator.grant(NPU, devices(*room.cards)[:1]))
        await until(lambda: room.allocator.states.value.orphans)
        before = room.allocator.devices[NPU].value
        changes(room)
        await first(room.allocator.devices[NPU], lambda listed: listed != before)
        room.kubelet.node.alive = set()
        room.says()
        with pytest.raises(RefusalError, match=r"is no longer listed|\(allocation\.api\)"):
            await granting


async def test_a_grant_by_a_list_that_is_not_on_the_disk_is_saved_first(tmp_path: Path) -> None:
    """The disk has the next list already, which is not published yet."""
    room = Room(tmp_path)
    await room.owned()
    listed = room.allocator.devices[NPU].value
    cuts(room)
    await room.allocator.replan()
    room.allocator.devices[NPU].publish(listed)
    await room.allocator.grant(NPU, listed[:1])
    recovered = recover(Ledger(), read_record(tmp_path), 0.0)
    assert DeviceName(NPU, "WARBOY-0") in recovered.allocations


async def test_changes_while_a_grant_is_saved_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path)
    await room.owned()
    listed = room.allocator.devices[NPU].value
    cuts(room)
    await room.allocator.replan()
    room.allocator.devices[NPU].publish(listed)
    write = files.replace

    async def failing(path: Path, content: bytes | None, **options: bool) -> bool:
        fails(room)
        return await write(path, content, **options)

    monkeypatch.setattr(files, "replace", failing)
    with pytest.raises(RefusalError, match="is unhealthy: the card does not answer"):
        await room.allocator.grant(NPU, listed[:1])


async def hangs(*_: object, **__: object) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("ours", [False, True])
async def test_a_grant_that_waits_for_the_node_says_whose_fault_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ours: bool
) -> None:
    """Another agent's, or that of the disk with our own record."""
    room = Room(tmp_path)
    room.allocator_timing = AllocatorTiming(owned=0.01)
    room.start()
    whole = devices(*room.cards)[:1]
    monkeypatch.setattr(files, "read", hangs)
    async with contextlib.AsyncExitStack() as stack:
        if ours:
            await stack.enter_async_context(background(room.allocator.renew()))
        await asyncio.sleep(0)
        with pytest.raises(RefusalError) as refused:
            await room.allocator.grant(NPU, whole)
    assert ("another agent serves this node" in str(refused.value)) == (not ours)
    assert (f"{tmp_path / RECORD}" in str(refused.value)) == ours


async def test_a_grant_is_given_up_when_all_that_it_waits_for_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path)
    room.allocator_timing = AllocatorTiming(grant=0.05)
    room.start()
    await room.owned()
    monkeypatch.setattr(room.kubelet.node, "device_holders", hangs)
    with pytest.raises(RefusalError, match=r"no answer within 0\.05 s: this agent's own files"):
        await room.allocator.grant(NPU, devices(*room.cards)[:1])


async def test_a_grant_waits_for_the_containers_of_the_pod_before(tmp_path: Path) -> None:
    room = await outlived(tmp_path)
    whole, other = devices(*room.cards)
    async with background(room.allocator.run()):
        granting = asyncio.create_task(room.allocator.grant(NPU, [whole]))
        await until(lambda: room.kubelet.asked > 1)
        assert room.allocator.states.value.orphans["old"].by == f"Pod team/train {STILL}"
        await room.allocator.grant(NPU, [other])
        room.says()
        assert not granting.done()
        room.kubelet.node.alive = set()
        room.says()
        await granting
        assert room.allocator.states.value.orphans == {}


async def test_an_init_container_that_waits_keeps_its_cores_over_a_restart(tmp_path: Path) -> None:
    """A rollout may cut its card in another way. The Pod has a cgroup, and no process yet."""
    room = Room(tmp_path)
    await room.owned()
    await room.allocator.grant(NPU, devices(*room.cards)[:1])
    room.start()
    room.kubelet.node.notes = {DeviceName(NPU, "WARBOY-0"): frozenset({"waits"})}
    room.kubelet.node.waiting = {"waits"}
    cuts(room)
    await room.owned()
    for _ in range(3):
        room.now += 2 * UNSEEN
        room.says()
    await room.allocator.replan()
    listed = {device.id: device.healthy for device in room.allocator.devices[NPU].value}
    assert listed == {
        "WARBOY-0_cores_0": False,
        "WARBOY-0_cores_1": False,
        "WARBOY-1_cores_0": True,
        "WARBOY-1_cores_1": True,
    }
    # The record is for the next agent, too.
    await ends(room, the_same)
    assert (tmp_path / RECORD).exists()


async def test_a_living_pod_had_one_of_several_devices(tmp_path: Path) -> None:
    room = await outlived(tmp_path)
    room.kubelet.node.notes |= {DeviceName(NPU, "WARBOY-1"): frozenset({"gone"})}
    room.says("WARBOY-0", "WARBOY-1")
    whole, other = devices(*room.cards)
    granting = asyncio.create_task(room.allocator.grant(NPU, [whole, other]))
    await until(lambda: room.allocator.states.value.orphans)
    assert room.allocator.states.value.orphans["old"].footprints == (footprint(whole),)
    await room.allocator.grant(NPU, [other])
    granting.cancel()


async def test_a_grant_does_not_wait_for_ever(tmp_path: Path) -> None:
    room = await outlived(tmp_path, AllocatorTiming(holder_ends=0.0))
    whole = devices(*room.cards)[0]
    with pytest.raises(RefusalError, match=re.escape(STILL)) as refused:
        await room.allocator.grant(NPU, [whole])
    assert refused.value.kind is Refusal.HELD


async def test_a_pod_is_known_before_the_kubelet_lists_it(tmp_path: Path) -> None:
    """It was given its device less than a second ago: what the kubelet notes is read again."""
    room = Room(tmp_path)
    await room.owned()
    whole = devices(*room.cards)[0]
    await room.allocator.grant(NPU, [whole])
    room.kubelet.node.notes = {DeviceName(NPU, "WARBOY-0"): frozenset({"old"})}
    room.kubelet.node.alive = {"old"}
    granting = asyncio.create_task(room.allocator.grant(NPU, [whole]))
    await until(lambda: room.kubelet.asked > 1)
    assert room.allocator.states.value.orphans["old"].by == f"the Pod with the UID old {STILL}"
    granting.cancel()


async def test_the_same_pod_may_be_given_its_device_again(tmp_path: Path) -> None:
    """That of an init container: the Pod has no process yet."""
    room = Room(tmp_path)
    await room.owned()
    whole = devices(*room.cards)[0]
    room.kubelet.node.notes = {DeviceName(NPU, "WARBOY-0"): frozenset({"new"})}
    for _ in range(2):
        await room.allocator.grant(NPU, [whole])


async def test_no_holder_ends_without_news_while_a_deleted_pod_lives(tmp_path: Path) -> None:
    room = await outlived(tmp_path)
    for _ in range(3):
        room.now += HOLDER_ENDS
        room.says()
    assert room.allocator.states.value.allocations == {}
    assert list(room.allocator.states.value.orphans) == ["old"]
    assert room.kubelet.asked_soon
    await ends(room)
    assert (tmp_path / RECORD).exists()  # for the next agent


async def test_the_record_stays_if_a_pod_that_was_just_forgotten_lives(tmp_path: Path) -> None:
    """The agent ends before a second answer that lacks it."""
    room = await outlived(tmp_path)
    room.says()
    assert room.allocator.states.value.allocations.keys() == {(NPU, "WARBOY-0")}
    await ends(room, the_same)
    assert (tmp_path / RECORD).exists()


async def test_the_record_stays_while_a_claim_is_prepared(tmp_path: Path) -> None:
    """Its card may have left the node, and the slices with it."""
    room = Room(tmp_path)
    await room.owned()
    await room.allocator.prepare(claim("c"), ())
    assert not room.allocator.states.value.published
    await ends(room)
    assert (tmp_path / RECORD).exists()


async def test_the_record_stays_for_a_pod_whose_uid_is_not_known(tmp_path: Path) -> None:
    """It came to share a claim that has ended; no cgroup shows that it runs."""
    room = Room(tmp_path)
    await room.owned()
    shared = replace(claim("c", room.cards[0]), unidentified=("later",))
    await room.allocator.prepare(shared, ())
    await room.allocator.unprepare(shared.uid)
    await room.allocator.saved()
    await ends(room)
    recovered = recover(Ledger(), read_record(tmp_path), 0.0)
    assert list(recovered.orphans) == ["ml/later"]


async def test_the_record_stays_while_earlier_grants_are_not_known(tmp_path: Path) -> None:
    """The record before it could not be read, and one answer that lists no Pod is not enough."""
    (tmp_path / RECORD).write_bytes(b"{")
    room = Room(tmp_path)
    renewing = asyncio.create_task(room.allocator.renew())
    await until(lambda: room.kubelet.asked)
    room.says()
    await renewing
    await ends(room, the_same)
    assert (tmp_path / RECORD).exists()


async def test_the_pod_of_a_device_is_noted_before_the_kubelet_forgets_it(tmp_path: Path) -> None:
    """In the record, too: the agent may be killed as soon as it has answered the kubelet."""
    room = Room(tmp_path)
    await room.owned()
    whole, other = devices(*room.cards)
    await room.allocator.grant(NPU, [whole])
    room.kubelet.node.notes = {DeviceName(NPU, "WARBOY-0"): frozenset({"old"})}
    await room.allocator.grant(NPU, [other])
    recovered = recover(Ledger(), read_record(tmp_path), 0.0)
    assert recovered.allocations[DeviceName(NPU, "WARBOY-0")].pod_uids == {"old"}
    room.kubelet.node.notes, room.kubelet.node.alive = {}, {"old"}
    granting = asyncio.create_task(room.allocator.grant(NPU, [whole]))
    await until(lambda: room.allocator.states.value.orphans)
    granting.cancel()


async def test_no_note_means_a_card_before_the_cards_are_known(tmp_path: Path) -> None:
    """The record cannot be read, and the kubelet answers first: a Pod keeps no other card."""
    (tmp_path / RECORD).write_bytes(b"{")
    room = Room(tmp_path)
    cards = room.cards
    room.snapshots.publish(Snapshot())
    room.kubelet.node.notes = {DeviceName(NPU, "WARBOY-0"): frozenset({"old"})}
    room.kubelet.node.alive = {"old"}
    for _ in range(2):
        room.says()
    room.have(*cards)
    room.allocator.reconcile()
    assert holders(room.allocator.facts(), cards).keys() == {"WARBOY-0", "WARBOY-1"}
    room.says()
    assert holders(room.allocator.facts(), cards).keys() == {"WARBOY-0"}


async def test_a_card_that_comes_is_compared_with_the_last_answer(tmp_path: Path) -> None:
    room = Room(tmp_path)
    cards = room.cards
    room.snapshots.publish(Snapshot(cards[:1], complete=True))
    room.allocator.reconcile()
    room.kubelet.node.notes = {DeviceName("old/name", "WARBOY-1"): frozenset({"old"})}
    room.kubelet.node.alive = {"old"}
    room.says()
    room.have(*cards)
    room.allocator.reconcile()
    assert holders(room.allocator.facts(), cards).keys() == {"WARBOY-1"}
