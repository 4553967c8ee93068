"""Who may be offered what: the two steps of a change of shape, hand-overs, and doubt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from npu_agent.core.hardware import Snapshot
from npu_agent.feed import Feed
from npu_agent.kubelet.podresources import Assignment, Holdings
from npu_agent.outputs import cdi
from npu_agent.outputs.deviceplugin.publisher import RECORD, Publisher, Wanted
from tests.outputs.deviceplugin.helpers import resources, state

NPU = "beta.furiosa.ai/npu"
FUSION = Wanted(resources(NPU, None), frozenset())
SINGLE = Wanted(resources(NPU, 1), frozenset())


class Room:
    """A publisher on one Warboy card, and a kubelet that answers when it is told to."""

    def __init__(self, directory: Path, wanted: Wanted = FUSION, *, by_cdi: bool = False) -> None:
        self.card = state()
        self.snapshots: Feed[Snapshot] = Feed(Snapshot((self.card,), complete=True))
        self.wanted: Feed[Wanted] = Feed(wanted)
        self.holdings: Feed[Holdings] = Feed(Holdings())
        self.asked = 0
        self.spec = directory / "cdi" / "spec.json"
        self.publisher = Publisher(
            snapshots=self.snapshots,
            wanted=self.wanted,
            holdings=self.holdings,
            ask=self.ask,
            directory=directory,
            cdi_file=self.spec if by_cdi else None,
        )
        self.messages: list[tuple[tuple[str, bool], ...]] = []

    def ask(self) -> None:
        self.asked += 1

    def says(self, *held: str, resource: str = NPU, error: str | None = None) -> None:
        """The kubelet answers: these devices are held."""
        assignments = tuple(Assignment("team", "train", "main", resource, id_) for id_ in held)
        self.holdings.publish(
            Holdings(assignments=assignments, asked_at=time.monotonic(), error=error)
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def note() -> None:
            async for devices in self.publisher.devices[NPU].watch():
                self.messages.append(tuple((d.id, d.healthy) for d in devices))

        tasks = [asyncio.create_task(self.publisher.run()), asyncio.create_task(note())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def until(self, met: Callable[[dict[str, bool]], object]) -> dict[str, bool]:
        async with asyncio.timeout(10):
            async for devices in self.publisher.devices[NPU].watch():
                offered = {d.id: d.healthy for d in devices}
                if met(offered):
                    return offered
        raise AssertionError

    async def owned(self) -> None:
        """This agent gets the node: the kubelet is asked, and answers that nothing is held."""
        renewing = asyncio.create_task(self.publisher.renew())
        before = self.asked
        async with asyncio.timeout(10):
            while self.asked == before:
                await asyncio.sleep(0)
        self.says()
        await renewing

    async def ended(self, *held: str, error: str | None = None) -> None:
        """The agent ends: the kubelet is asked once more, and answers so."""
        ending = asyncio.create_task(self.publisher.end())
        before = self.asked
        async with asyncio.timeout(10):
            while self.asked == before:
                await asyncio.sleep(0)
        self.says(*held, error=error)
        await ending


async def test_nothing_is_said_before_all_is_known(tmp_path: Path) -> None:
    room = Room(tmp_path)
    room.snapshots.publish(Snapshot())
    async with room.running():
        room.says()
        await asyncio.sleep(0)
        assert room.publisher.devices[NPU].value == ()
        room.snapshots.publish(Snapshot((room.card,), complete=True))
        await room.until(lambda d: d == {room.card.id: True})
    assert room.messages == [(), ((room.card.id, True),)]


async def test_a_change_of_shape_waits_for_the_kubelets_word(tmp_path: Path) -> None:
    room = Room(tmp_path)
    card = room.card.id
    async with room.running():
        room.says()
        await room.owned()
        await room.until(lambda d: d == {card: True})
        asked = room.asked
        room.wanted.publish(SINGLE)
        parts = {f"{card}_cores_0": False, f"{card}_cores_1": False}
        await room.until(lambda d: d == parts)
        assert room.asked == asked + 1
        reason = room.publisher.devices[NPU].value[0].reason
        assert "the kubelet has not said yet who holds what" in reason
        room.says()
        await room.until(lambda d: d == dict.fromkeys(parts, True))


async def test_what_a_pod_holds_in_the_old_shape_keeps_the_new_one_back(tmp_path: Path) -> None:
    room = Room(tmp_path)
    card = room.card.id
    parts = {f"{card}_cores_0": False, f"{card}_cores_1": False}
    async with room.running():
        room.says(card)
        await room.until(lambda d: d == {card: True})
        room.wanted.publish(SINGLE)
        await room.until(lambda d: d == parts)
        room.says(card)
        await room.until(lambda d: d == parts and _reason(room).startswith("Pod team/train"))
        room.says()
        await room.until(lambda d: d == dict.fromkeys(parts, True))


async def test_a_device_just_allocated_counts_before_the_kubelet_shows_it(tmp_path: Path) -> None:
    room = Room(tmp_path)
    card = room.card.id
    async with room.running():
        room.says()
        await room.until(lambda d: d == {card: True})
        room.publisher.allocated(NPU, [card])
        room.wanted.publish(SINGLE)
        await room.until(len)
        room.says()
        await room.until(lambda d: len(d) == 2 and _reason(room).startswith("a container"))
        assert not any(d.healthy for d in room.publisher.devices[NPU].value)


async def test_another_resources_holder_keeps_even_the_same_device_back(tmp_path: Path) -> None:
    room = Room(tmp_path)
    async with room.running():
        room.says(room.card.id, resource="furiosa.ai/warboy")
        await room.until(lambda d: d == {room.card.id: False})


async def test_a_new_owner_asks_before_it_offers(tmp_path: Path) -> None:
    """What it knew may be older than the last Allocate of the agent before it."""
    Room(tmp_path)  # nothing was recorded yet
    (tmp_path / RECORD).write_text(json.dumps({"warboy": [NPU, 2]}))
    room = Room(tmp_path, SINGLE)
    card = room.card.id
    async with room.running():
        room.says()
        await room.until(lambda d: len(d) == 2)
        renewing = asyncio.create_task(room.publisher.renew())
        while not room.asked:
            await asyncio.sleep(0)
        assert not renewing.done()
        room.says(card)
        await renewing
        assert not any(d.healthy for d in room.publisher.devices[NPU].value)


@pytest.mark.parametrize(
    ("recorded", "offered"),
    [
        (None, True),  # nothing was ever handed out here
        ({"warboy": [NPU, 2]}, True),  # the shape of before: the kubelet counts for itself
        ({"warboy": [NPU, 1]}, False),
        ({"warboy": ["furiosa.ai/warboy", 2]}, False),
    ],
)
async def test_doubt_at_the_start(
    tmp_path: Path, recorded: dict[str, object] | None, offered: bool
) -> None:
    """The kubelet does not say who holds what: only the shape of before is safe."""
    if recorded is not None:
        (tmp_path / RECORD).write_text(json.dumps(recorded))
    room = Room(tmp_path)
    async with room.running():
        room.says(error="kubelet.sock is missing")
        assert await room.until(len) == {room.card.id: offered}
        if not offered:
            assert "kubelet.sock is missing" in _reason(room)
            room.says()
            await room.until(lambda d: d == {room.card.id: True})


async def test_the_shape_is_recorded_once_nobody_holds_the_old_one(tmp_path: Path) -> None:
    record = tmp_path / RECORD
    record.write_text(json.dumps({"warboy": [NPU, 2]}))
    room = Room(tmp_path, SINGLE)
    async with room.running():
        room.says(room.card.id)
        renewing = asyncio.create_task(room.publisher.renew())
        while not room.asked:
            await asyncio.sleep(0)
        room.says(room.card.id)
        await renewing
        assert json.loads(record.read_text())["warboy"] == [NPU, 2]
        room.says()
        await room.until(lambda d: all(d.values()))
        async with asyncio.timeout(10):
            while json.loads(record.read_text())["warboy"] != [NPU, 1]:
                await asyncio.sleep(0.001)


async def test_a_card_that_vanishes_under_a_running_pod_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "npu_agent.outputs.deviceplugin.publisher")
    room = Room(tmp_path)
    card = room.card.id
    async with room.running():
        room.says(card)
        await room.until(lambda d: d == {card: True})
        room.snapshots.publish(Snapshot((), complete=True))
        await room.until(lambda d: not d)
        room.says(card)
        room.snapshots.publish(Snapshot((room.card,), complete=True))
        await room.until(lambda d: d == {card: True})
    assert [record.message for record in caplog.records] == [
        "a running Pod holds a device that is no longer listed",
        "the device is listed again, or its Pod has ended",
    ]
    assert caplog.records[0].fields == {"pod": "team/train", "device": card}  # type: ignore[attr-defined]


async def test_cdi_specs_are_there_before_the_device_is_offered(tmp_path: Path) -> None:
    room = Room(tmp_path, by_cdi=True)
    async with room.running():
        room.says()
        await room.until(lambda d: d == {room.card.id: True})
        spec = json.loads(room.spec.read_text())
        assert spec["kind"] == cdi.KIND
        assert [device["name"] for device in spec["devices"]] == [room.card.id]
        room.snapshots.publish(Snapshot((), complete=True))
        await room.until(lambda d: not d)
        assert not room.spec.exists()


async def test_without_a_cdi_spec_nothing_is_offered(tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("in the way")
    room = Room(tmp_path, by_cdi=True)
    async with room.running():
        room.says()
        await room.until(lambda d: d == {room.card.id: False})
        assert "cannot be written" in _reason(room)


def _reason(room: Room) -> str:
    return room.publisher.devices[NPU].value[0].reason


async def test_nothing_is_left_on_the_disk_if_no_container_holds_a_device(tmp_path: Path) -> None:
    room = Room(tmp_path, by_cdi=True)
    record = tmp_path / RECORD
    async with room.running():
        await room.owned()
        async with asyncio.timeout(10):
            while not (record.exists() and room.spec.exists()):
                await asyncio.sleep(0.001)
        await room.ended()
        assert not record.exists()
        assert not room.spec.exists()
        # What happens from here on is the next one's.
        room.snapshots.publish(Snapshot((state(index=1, id_="other"),), complete=True))
        await room.until(lambda d: "other" in d)
        assert not record.exists()
        assert not room.spec.exists()


@pytest.mark.parametrize("why", ["held", "just allocated", "not said", "no answer", "not ours"])
async def test_what_the_next_agent_needs_is_left(tmp_path: Path, why: str) -> None:
    room = Room(tmp_path, by_cdi=True)
    record = tmp_path / RECORD
    card = room.card.id
    async with room.running():
        await room.owned()
        async with asyncio.timeout(10):
            while not (record.exists() and room.spec.exists()):
                await asyncio.sleep(0.001)
        match why:
            case "held":
                await room.ended(card)
            case "just allocated":
                room.publisher.allocated(NPU, [card])
                await room.ended()
            case "not said":
                await room.ended(error="no answer")
            case "no answer":
                await room.publisher.end()
            case "not ours":
                await Room(tmp_path, by_cdi=True).publisher.end()
        assert record.exists()
        assert room.spec.exists()


async def test_a_record_of_the_one_before_us_is_read_when_the_node_is_ours(tmp_path: Path) -> None:
    room = Room(tmp_path)
    record = tmp_path / RECORD
    async with room.running():  # it stands by
        record.write_text(json.dumps({"warboy": [NPU, 1]}))
        renewing = asyncio.create_task(room.publisher.renew())
        async with asyncio.timeout(10):
            while not room.asked:
                await asyncio.sleep(0)
        room.says(error="no answer")
        await renewing
        offered = await room.until(bool)
        assert offered == {room.card.id: False}
        assert "cut otherwise before" in _reason(room)
