"""Who may be offered what: the two steps of a change of shape, hand-overs, and doubt."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from npu_agent import files
from npu_agent.core.grant import RefusalError
from npu_agent.core.hardware import CardState, Health, HealthState, Snapshot
from npu_agent.core.ledger import Assignment, Ledger, keys_of
from npu_agent.core.offer import Device, advertise
from npu_agent.core.plan import DraWishes, PluginWishes
from npu_agent.feed import Feed
from npu_agent.kubelet.allocator import AllocatorTiming
from npu_agent.kubelet.cdi import PluginSpecs
from npu_agent.kubelet.podresources import Holdings
from npu_agent.kubelet.record import RECORD, encode, read_record, recover
from npu_agent.supervise import background
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.deviceplugin.helpers import resources, state
from tests.outputs.helpers import DRIVER, Kubelet, allocator_of, claim
from tests.until import first, until

NPU = "beta.furiosa.ai/npu"
SPEC = "furiosa.ai-npu.json"
FUSION = PluginWishes(resources(NPU, None), frozenset(), FAMILIES)
SINGLE = PluginWishes(resources(NPU, 1), frozenset(), FAMILIES)


class Room:
    """A publisher on one Warboy card, and a kubelet that answers when it is told to."""

    def __init__(
        self, directory: Path, wishes: PluginWishes = FUSION, *, by_cdi: bool = False
    ) -> None:
        self.card = state()
        self.snapshots: Feed[Snapshot] = Feed(Snapshot((self.card,), complete=True))
        self.wishes: Feed[PluginWishes] = Feed(wishes)
        self.now = 1000.0
        self.kubelet = Kubelet(recover(Ledger(), read_record(directory), self.clock()))
        self.spec = directory / "cdi" / SPEC
        self.claims = Feed(DraWishes(families=frozenset()))
        self.allocator = allocator_of(
            self.kubelet,
            self.snapshots,
            directory,
            self.wishes,
            self.claims,
            specs=PluginSpecs(directory / "cdi", "furiosa.ai/npu", by_cdi=by_cdi),
            timing=AllocatorTiming(clock=self.clock),
        )
        self.messages: list[tuple[tuple[str, bool], ...]] = []

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def says(self, *held: str, resource: str = NPU, error: str | None = None) -> None:
        """The kubelet answers, two seconds later: these devices are held."""
        self.now += 2.0
        assignments = tuple(Assignment("team", "train", "main", resource, id_) for id_ in held)
        self.kubelet.holdings.publish(
            Holdings(assignments=assignments, asked_at=self.now, error=error)
        )

    async def granted(self) -> None:
        """The whole list is allocated."""
        await self.allocator.grant(NPU, self.allocator.devices[NPU].value)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def note() -> None:
            async for devices in self.allocator.devices[NPU].watch():
                self.messages.append(tuple((d.id, d.healthy) for d in devices))

        async with background(self.allocator.run(), note()):
            yield

    async def until(self, met: Callable[[dict[str, bool]], object]) -> dict[str, bool]:
        def offered(devices: tuple[Device, ...]) -> dict[str, bool]:
            return {d.id: d.healthy for d in devices}

        return offered(await first(self.allocator.devices[NPU], lambda d: met(offered(d))))

    async def owned(self, *held: str) -> None:
        """This agent gets the node: the kubelet is asked, and answers that these are held."""
        renewing = asyncio.create_task(self.allocator.renew())
        before = self.kubelet.asked
        await until(lambda: self.kubelet.asked > before)
        self.says(*held)
        await renewing

    async def ended(self, *held: str, error: str | None = None) -> None:
        """The agent ends: the kubelet is asked once more, and answers so."""
        ending = asyncio.create_task(self.allocator.end())
        before = self.kubelet.asked
        await until(lambda: self.kubelet.asked > before)
        self.says(*held, error=error)
        await ending


@contextlib.asynccontextmanager
async def offering(directory: Path, *, by_cdi: bool = False) -> AsyncIterator[Room]:
    """The node is this agent's, and its card is offered."""
    room = Room(directory, by_cdi=by_cdi)
    async with room.running():
        await room.owned()
        await room.until(lambda d: d == {room.card.id: True})
        if by_cdi:
            await until((directory / "cdi" / SPEC).exists)
        yield room


async def test_no_device_is_listed_before_cards_and_holders_are_known(tmp_path: Path) -> None:
    room = Room(tmp_path)
    room.snapshots.publish(Snapshot())
    async with room.running():
        room.says()
        await asyncio.sleep(0)
        assert room.allocator.devices[NPU].value == ()
        room.snapshots.publish(Snapshot((room.card,), complete=True))
        await room.until(lambda d: d == {room.card.id: True})
    assert room.messages == [(), ((room.card.id, True),)]


async def test_no_device_is_offered_before_the_kubelet_has_said_who_holds_what(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    await room.allocator.replan()
    assert room.allocator.devices[NPU].value == ()
    room.says(error="kubelet.sock is missing")  # it cannot say: then nobody is waited for
    await room.allocator.replan()
    assert len(room.allocator.devices[NPU].value) == 1


async def test_a_claim_that_is_prepared_or_ends_is_published_without_an_answer(
    tmp_path: Path,
) -> None:
    async with offering(tmp_path) as room:
        await room.allocator.prepare(claim("c", room.card), ())
        await room.until(lambda d: d == {room.card.id: False})
        await room.allocator.unprepare("uid-c")
        await room.until(lambda d: d == {room.card.id: True})


async def test_a_grant_while_a_file_is_written_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writing, go_on = files.replace, asyncio.Event(), asyncio.Event()

    async def slow(path: Path, content: bytes | None, **options: bool) -> None:
        writing.set()
        await go_on.wait()
        await write(path, content, **options)

    async with offering(tmp_path) as room:
        monkeypatch.setattr(files, "replace", slow)
        room.wishes.publish(SINGLE)
        async with asyncio.timeout(10):
            await writing.wait()
        # Of the old list, which is still the one that is offered, and may be on the disk no more.
        granting = asyncio.create_task(room.granted())
        await until(lambda: room.allocator.states.value.allocations)
        assert not granting.done()
        go_on.set()
        await granting
        recorded = recover(Ledger(), read_record(tmp_path), 0.0)
        assert (NPU, room.card.id) in recorded.allocations
        assert not any((await room.until(lambda d: len(d) == 2)).values())


def record(wanted: PluginWishes) -> bytes:
    """What an agent has left that offered this, and granted none of it as far as it is known."""
    cards = Snapshot((state(),), complete=True)
    offered = {one.name: advertise(cards, one) for one in wanted.resources}
    return encode(Ledger().with_offer(offered, cards.cards))


async def test_a_new_owner_asks_before_it_offers(tmp_path: Path) -> None:
    """What it knew may be older than the last Allocate of the agent before it."""
    (tmp_path / RECORD).write_bytes(record(FUSION))
    room = Room(tmp_path, SINGLE)
    card = room.card.id
    async with room.running():
        room.says()
        await room.until(lambda d: len(d) == 2)
        renewing = asyncio.create_task(room.allocator.renew())
        while not room.kubelet.asked:
            await asyncio.sleep(0)
        assert not renewing.done()
        room.says(card)
        await renewing
        assert not any(d.healthy for d in room.allocator.devices[NPU].value)


@pytest.mark.parametrize(
    ("left", "offered"),
    [
        (None, True),  # nothing was ever handed out here
        (record(FUSION), True),  # the same devices: the kubelet counts for itself
        (record(SINGLE), False),
        (record(PluginWishes(resources("furiosa.ai/warboy", None), frozenset(), FAMILIES)), False),
        (b"damaged", False),
    ],
)
async def test_doubt_at_the_start(tmp_path: Path, left: bytes | None, offered: bool) -> None:
    """The kubelet does not say who holds what: only what was offered before is safe."""
    if left is not None:
        (tmp_path / RECORD).write_bytes(left)
    room = Room(tmp_path)
    async with room.running():
        room.says(error="kubelet.sock is missing")
        assert await room.until(len) == {room.card.id: offered}
        async with asyncio.timeout(10):
            while not room.allocator.devices[NPU].value[0].healthy:
                room.says()
                await asyncio.sleep(0.001)


async def test_a_card_for_claims_stays_listed_while_a_pod_holds_it(tmp_path: Path) -> None:
    room = Room(tmp_path)
    card = room.card.id
    async with room.running():
        await room.owned(card)
        await room.until(lambda d: d == {card: True})
    room = Room(tmp_path, replace(FUSION, families=()))
    async with room.running():
        await room.owned(card)
        room.says(card)
        devices = await first(room.allocator.devices[NPU], lambda d: d and "train" in d[0].reason)
        assert (devices[0].healthy, devices[0].reason) == (
            False,
            "the device plugin does not offer its card (allocation.api); Pod team/train keeps it",
        )
        async with asyncio.timeout(10):
            while room.allocator.devices[NPU].value:
                room.says()
                await asyncio.sleep(0.001)


async def test_a_card_that_a_slice_may_have_is_not_offered(tmp_path: Path) -> None:
    async with offering(tmp_path) as room:
        ledger = room.kubelet.ledger
        ledger.publish(ledger.value.with_published(DRIVER, [room.card]))
        await room.until(lambda d: d == {room.card.id: False})
        room.allocator.pool.confirmed.publish(())
        await room.until(lambda d: d == {room.card.id: True})


async def test_slices_that_were_confirmed_before_a_card_was_offered_do_not_release_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card goes, and they may be written with it as long as the pool has it."""
    room = Room(tmp_path)
    room.claims.publish(DraWishes(families=frozenset({"warboy"})))
    pool = room.allocator.pool
    pool.confirmed.publish(())
    await room.owned()
    assert pool.offered.value
    published = []

    async def note(*_things: object, **_named: object) -> None:
        published.append([*room.allocator.published.value])

    monkeypatch.setattr(room.allocator.specs, "write", note)
    room.snapshots.publish(Snapshot((), complete=True))
    await room.allocator.replan()
    assert (published[0], pool.offered.value) == ([room.card.id], ())
    await room.allocator.replan()
    assert published[-1] == []


async def test_no_device_is_offered_before_it_is_on_the_disk(tmp_path: Path) -> None:
    room = Room(tmp_path)

    async def watch() -> None:
        async for devices in room.allocator.devices[NPU].watch():
            if len(devices) == 2:
                found = json.loads((tmp_path / RECORD).read_bytes())
                assert {d.id for d in devices} <= {
                    device for (_, device), *_ in found["allocations"]
                }
                return

    async with room.running():
        await room.owned()
        watching = asyncio.create_task(watch())
        room.wishes.publish(SINGLE)
        async with asyncio.timeout(10):
            await watching


async def test_devices_of_the_last_good_cdi_spec_are_offered_although_no_new_one_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.replace

    async def refused(path: Path, content: bytes | None, **how: Any) -> None:
        if path == room.spec:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        await write(path, content, **how)

    async with offering(tmp_path, by_cdi=True) as room:
        card = room.card.id
        monkeypatch.setattr(files, "replace", refused)
        new = Snapshot((room.card, state(index=1, id_="new")), complete=True)
        room.snapshots.publish(new)
        await room.until(lambda d: d == {card: True, "new": False})
        assert "cannot be written" in room.allocator.devices[NPU].value[1].reason
        assert room.allocator.specs.error == f"{room.spec}: {os.strerror(errno.EROFS)}"
        monkeypatch.undo()
        room.says()  # as it does every few seconds: it is tried again
        await room.until(lambda d: d == {card: True, "new": True})
        assert not room.allocator.specs.error
    assert all(dict(message)[card] for message in room.messages if message)


def _reason(room: Room) -> str:
    return room.allocator.devices[NPU].value[0].reason


async def test_no_file_is_left_on_the_disk_if_no_container_holds_a_device(tmp_path: Path) -> None:
    record = tmp_path / RECORD
    async with offering(tmp_path, by_cdi=True) as room:
        await room.ended()
        assert not record.exists()
        assert not room.spec.exists()
        # What happens from here on is the next one's.
        room.snapshots.publish(Snapshot((state(index=1, id_="other"),), complete=True))
        await room.until(lambda d: "other" in d)
        assert not record.exists()
        assert not room.spec.exists()


@pytest.mark.parametrize("why", ["held", "just allocated", "not said", "no answer", "not ours"])
async def test_the_record_that_the_next_agent_needs_is_left(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / RECORD
    async with offering(tmp_path, by_cdi=True) as room:
        match why:
            case "held":
                await room.ended(room.card.id)
            case "just allocated":
                await room.granted()
                await room.ended()
            case "not said":
                await room.ended(error="no answer")
            case "no answer":
                await room.allocator.end()
            case "not ours":
                other = Room(tmp_path, by_cdi=True)
                monkeypatch.setattr(other.kubelet, "ask", other.says)
                await other.allocator.end()
        assert record.exists()
        assert room.spec.exists()


def full_disk(monkeypatch: pytest.MonkeyPatch) -> AsyncMock:
    full = AsyncMock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(files, "replace", full)
    return full


async def test_a_record_that_cannot_be_written_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds up nothing."""
    (tmp_path / RECORD).mkdir()  # in the way
    room = Room(tmp_path)
    async with room.running():
        await room.owned()
        room.wishes.publish(SINGLE)
        await room.until(lambda d: len(d) == 2)
        (tmp_path / RECORD).rmdir()
        for _ in range(3):
            room.says()
        await until((tmp_path / RECORD).is_file)
    messages = [record.message for record in caplog.records]
    assert messages == ["cannot write the record of allocations"]


async def test_a_record_that_is_gone_vouches_for_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another agent had the node meanwhile, and removed it at its end; now the disk is full."""
    room = Room(tmp_path)
    room.claims.publish(DraWishes(families=frozenset({"warboy"})))
    await room.owned()
    pool = room.allocator.pool
    assert pool.offered.value
    room.allocator.disowned()
    (tmp_path / RECORD).unlink()
    full_disk(monkeypatch)
    await room.owned()
    assert pool.offered.value == ()


async def test_a_card_for_slices_waits_alone_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path)
    room.claims.publish(DraWishes(families=frozenset({"warboy"})))
    pool, new = room.allocator.pool, state(index=1, id_="new")
    dead = Health(state=HealthState.UNHEALTHY, reason="dead", since=0.0)
    async with room.running():
        with monkeypatch.context() as patched:
            full = full_disk(patched)
            await room.owned()
            await until(lambda: full.call_count)
            assert pool.offered.value is None
        room.says()  # as it does every few seconds: it is tried again
        await first(pool.offered, lambda devices: devices)
        with monkeypatch.context() as patched:
            full = full_disk(patched)
            room.snapshots.publish(Snapshot((room.card, new), complete=True))
            await until(lambda: full.call_count)
            room.snapshots.publish(Snapshot((replace(room.card, health=dead), new), complete=True))
            devices = await first(pool.offered, lambda devices: devices and devices[0].taints)
            assert [device.device.card_id for device in devices or ()] == [room.card.id]
        room.says()
        await first(pool.offered, lambda devices: devices and len(devices) == 2)
    assert not pool.unwritten.value


async def test_no_device_is_offered_while_claims_in_use_are_not_known(tmp_path: Path) -> None:
    use = Assignment("team", "pod", "main", "npu.furiosa.ai", "npu-0", "c")
    async with offering(tmp_path) as room:
        room.now += 2.0
        room.kubelet.holdings.publish(Holdings(claim_uses=(use,), asked_at=room.now))
        await room.until(lambda d: d == {room.card.id: False})
        assert "are missing from the agent's record" in _reason(room)
        room.allocator.recovery_done()
        await room.until(lambda d: d == {room.card.id: True})


@contextlib.contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[threading.Event]:
    """Whatever opens a file of this name hangs, and sets the event."""
    hangs, go_on = threading.Event(), threading.Event()
    regular = files.regular

    def opening(path: Path, flags: int) -> int:
        if path.name == name:
            hangs.set()
            go_on.wait(30)
        return regular(path, flags)

    with monkeypatch.context() as patched:
        patched.setattr(files, "regular", opening)
        yield hangs
        go_on.set()


def dead(card: CardState) -> CardState:
    return replace(card, health=Health(state=HealthState.UNHEALTHY, reason="dead", since=0.0))


@pytest.mark.parametrize("name", [RECORD, SPEC])
async def test_bad_news_waits_for_no_disk(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that comes does: for as long as the disk hangs."""
    async with offering(tmp_path, by_cdi=True) as room:
        card, new, gone = room.card, state(index=1, id_="new"), state(index=2, id_="gone")
        room.snapshots.publish(Snapshot((card, gone), complete=True))
        await room.until(lambda d: d == {card.id: True, "gone": True})
        with hanging(monkeypatch, name) as hangs:
            room.snapshots.publish(Snapshot((card, new, gone), complete=True))
            await until(hangs.is_set)
            room.snapshots.publish(Snapshot((dead(card), new, gone), complete=True))
            await room.until(lambda d: d == {card.id: False, "gone": True})
            room.snapshots.publish(Snapshot((dead(card), new), complete=True))
            await room.until(lambda d: d == {card.id: False})
            room.snapshots.publish(Snapshot((card, new), complete=True))
            room.allocator.cordons.cards.publish({"new": "swap fan"})
            for _ in range(20):
                await asyncio.sleep(0)
            assert room.messages[-1] == ((card.id, False),)
        room.says()
        await room.until(lambda d: d == {card.id: True, "new": False})


async def test_a_card_of_the_slices_is_tainted_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path)
    room.claims.publish(DraWishes(families=frozenset({"warboy"})))
    pool, new = room.allocator.pool, state(index=1, id_="new")
    async with room.running():
        await room.owned()
        await first(pool.offered, lambda devices: devices)
        with hanging(monkeypatch, RECORD) as hangs:
            room.snapshots.publish(Snapshot((room.card, new), complete=True))
            await until(hangs.is_set)
            room.snapshots.publish(Snapshot((dead(room.card), new), complete=True))
            devices = await first(pool.offered, lambda devices: devices and devices[0].taints)
            assert [device.device.card_id for device in devices or ()] == [room.card.id]
            assert not pool.unwritten.value  # the write has not failed yet
        await first(pool.offered, lambda devices: devices and len(devices) == 2)


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("name", [RECORD, SPEC])
async def test_a_disk_that_hangs_does_not_keep_the_agent(
    tmp_path: Path, name: str, removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the file's deadline of 5 s has passed, and hands out nothing any more."""
    hangs, go_on = threading.Event(), threading.Event()
    regular, unlink = files.regular, Path.unlink

    def hang(path: Path) -> None:
        if path.name == name:
            hangs.set()
            go_on.wait(30)

    def opening(path: Path, flags: int) -> int:
        hang(path)
        return regular(path, flags)

    def removing(path: Path, *, missing_ok: bool = False) -> None:
        hang(path)
        unlink(path, missing_ok=missing_ok)

    async with offering(tmp_path, by_cdi=True) as room:
        # The spec is there a moment before its writer has come to its end.
        await until(lambda: not room.allocator._replanning.locked())
        monkeypatch.setattr(files, "regular", opening)
        monkeypatch.setattr(Path, "unlink", removing)
        if removed:
            await room.ended()
        else:
            room.snapshots.publish(Snapshot((room.card, state(index=1, id_="o")), complete=True))
            await until(hangs.is_set)
            await room.allocator.end()
        assert hangs.is_set()
        assert room.allocator.specs.error is None  # no deadline has passed
        assert not room.allocator.owned
        with pytest.raises(RefusalError, match="shutting down"):
            await room.granted()
        with pytest.raises(RefusalError, match="shutting down"):
            await room.allocator.prepare(claim("c", room.card), room.allocator.devices[NPU].value)
        go_on.set()
        asked = room.kubelet.asked
        renewing = asyncio.create_task(room.allocator.renew())  # of a session that just began
        await until(lambda: room.kubelet.asked > asked)
        room.says()
        await renewing
        assert not room.allocator.owned


async def test_the_record_of_the_one_before_us_is_read_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DRA saves what it is about to publish, maybe at the moment when the node becomes ours."""
    may_read, reading = asyncio.Event(), asyncio.Event()
    read = files.read

    async def slowly(path: Path, most: int, **named: Any) -> bytes:
        reading.set()
        await may_read.wait()
        return await read(path, most, **named)

    async def replace_now(path: Path, content: bytes, **_: object) -> None:
        path.write_bytes(content)

    room = Room(tmp_path)
    async with room.running():  # it stands by
        (tmp_path / RECORD).write_bytes(record(SINGLE))
        monkeypatch.setattr(files, "read", slowly)
        monkeypatch.setattr("npu_agent.files.replace", replace_now)
        renewing = asyncio.create_task(room.allocator.renew())
        await until(reading.is_set)
        saving = asyncio.create_task(room.allocator.saved())
        for _ in range(10):
            await asyncio.sleep(0)
        may_read.set()
        await until(lambda: room.kubelet.asked)
        room.says(error="no answer")
        await asyncio.gather(renewing, saving)
        assert await room.until(bool) == {room.card.id: False}
        assert "a container from before the agent's start" in _reason(room)


async def test_answers_of_the_kubelet_do_not_keep_a_plan_from_being_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer changes the ledger, and comes while the CDI directory is slow."""
    room = Room(tmp_path, by_cdi=True)
    await room.owned()
    (device,) = room.allocator.devices[NPU].value
    write = room.allocator.specs.write

    async def slow(*things: Any, **named: Any) -> None:
        await write(*things, **named)
        room.says(device.id)
        room.allocator.reconcile()

    monkeypatch.setattr(room.allocator.specs, "write", slow)
    dead = Health(state=HealthState.UNHEALTHY, reason="dead", since=0.0)
    room.snapshots.publish(Snapshot((replace(room.card, health=dead),), complete=True))
    async with asyncio.timeout(5):
        await room.allocator.replan()
    assert [device.healthy for device in room.allocator.devices[NPU].value] == [False]


async def test_a_card_that_is_another_by_the_time_of_the_write_is_recorded_before_it_is_in_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path, PluginWishes(resources(NPU, None), frozenset(), ()))
    await room.owned()
    pool = room.allocator.pool
    moved = replace(room.card, card=replace(room.card.card, pci_bus_id="0000:99:00.0"))
    write = room.allocator.specs.write

    async def moving(*things: Any, **named: Any) -> None:
        await write(*things, **named)
        room.snapshots.publish(Snapshot((moved,), complete=True))

    monkeypatch.setattr(room.allocator.specs, "write", moving)
    room.claims.publish(DraWishes(families=frozenset({room.card.card.family})))
    await room.allocator.replan()
    recorded = recover(Ledger(), read_record(tmp_path), 0.0).published
    assert pool.offered.value
    for device in pool.offered.value:
        assert keys_of(device.device.card) <= recorded[device.device.card_id].keys


async def test_a_write_that_failed_and_was_done_later_vouches_for_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path, PluginWishes(resources(NPU, None), frozenset(), ()))
    offered = DraWishes(families=frozenset({room.card.card.family}))
    room.claims.publish(offered)
    await room.owned()
    pool = room.allocator.pool
    room.claims.publish(DraWishes(families=frozenset()))
    await room.allocator.replan()
    pool.confirmed.publish(pool.offered.value)
    written = files.replace

    async def late(path: Path, content: bytes, **named: Any) -> None:
        await written(path, content, **named)
        raise TimeoutError(errno.ETIMEDOUT, "no answer within 5 s")

    monkeypatch.setattr(files, "replace", late)
    await room.allocator.replan()
    assert not recover(Ledger(), read_record(tmp_path), 0.0).published
    full_disk(monkeypatch)
    room.claims.publish(offered)
    await room.allocator.replan()
    assert pool.offered.value == ()
    assert "No space left" in pool.unwritten.value
