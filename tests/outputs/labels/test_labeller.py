"""When the labeller looks and writes, and how it goes on after a failure; against a fake place."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest

from npu_agent.core.hardware import SkippedDevice, Snapshot
from npu_agent.core.vendor import LabelSet
from npu_agent.feed import Feed
from npu_agent.outputs.labels import labeller
from npu_agent.outputs.labels.compute import Machine
from npu_agent.outputs.labels.labeller import Labeller, LabelSettings, LabelTiming
from npu_agent.outputs.labels.outputs import OutputError
from npu_agent.ticks import set_within
from npu_agent.vendors.furiosa.labels import SETS
from tests.outputs.labels.test_compute import HOSTS, UNREAD, card, host
from tests.until import first, until


def cards(count: int, *skipped: SkippedDevice) -> Snapshot:
    return host(*(card(index=index) for index in range(count)), skipped=skipped)


class Place:
    """Takes labels as told: each `put` is kept, and may be refused or held up."""

    name: Literal["api", "nfd"] = "api"

    def __init__(self) -> None:
        self.puts: Feed[tuple[tuple[Mapping[str, str], bool], ...]] = Feed(())
        self.refusal: OutputError | None = None
        self.answer = Counter(written=1)
        self.answers = asyncio.Event()
        self.answers.set()

    async def put(self, labels: Mapping[str, str], *, careful: bool) -> Counter[str]:
        self.puts.publish((*self.puts.value, (dict(labels), careful)))
        await self.answers.wait()
        if self.refusal:
            raise self.refusal
        return self.answer


async def acme() -> Machine:
    return Machine(vendor="Acme", name="Box 1")


@dataclass
class Room:
    snapshots: Feed[Snapshot] = field(default_factory=lambda: Feed(cards(2)))
    sets: Feed[Collection[LabelSet]] = field(default_factory=lambda: Feed((SETS["beta"],)))
    place: Place = field(default_factory=Place)
    seen: Feed[Mapping[str, str] | None] | None = None
    resync: Feed[float] = field(default_factory=lambda: Feed(3600.0))
    timing: LabelTiming = field(
        default_factory=lambda: LabelTiming(settle=0.01, longest_pause=0.01)
    )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Labeller]:
        one = Labeller(
            snapshots=self.snapshots,
            settings=self.sets.map_with(self.resync, LabelSettings),
            output=self.place,
            seen=self.seen,
            machine=acme,
            timing=self.timing,
        )
        task = asyncio.create_task(one.run())
        try:
            yield one
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def put(self, number: int) -> Mapping[str, str]:
        """Waits for the so-manieth put, counted from 1; returns its labels."""
        return (await first(self.place.puts, lambda puts: len(puts) >= number))[number - 1][0]


@pytest.fixture
def room() -> Room:
    return Room()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each pause, which takes a millisecond instead."""
    noted: list[float] = []

    async def short(event: asyncio.Event, seconds: float) -> bool:
        noted.append(seconds)
        return await set_within(event, 0.001)

    monkeypatch.setattr(labeller, "set_within", short)
    return noted


async def test_labels_are_put_once_and_not_again_while_nothing_changes(room: Room) -> None:
    async with room.running() as one:
        labels = await room.put(1)
        assert labels["beta.furiosa.ai/npu.count"] == "2"
        assert labels["beta.furiosa.ai/machine.vendor"] == "Acme"
        assert labels["beta.furiosa.ai/machine.name"] == "Box-1"
        await first(one.state, lambda state: state.in_place)
        assert one.state.value.labels == labels
        assert one.state.value.applied_at is not None
        # A card fails and recovers; the labels are what they were.
        for snapshot in (HOSTS["one-unhealthy-of-two"][0], cards(2)) * 10:
            room.snapshots.publish(snapshot)
            await asyncio.sleep(0)
        assert len(room.place.puts.value) == 1
        assert one.results == {"written": 1}


async def test_new_labels_are_not_in_place_before_there_is_an_answer(room: Room) -> None:
    async with room.running() as one:
        await room.put(1)
        await first(one.state, lambda state: state.in_place)
        room.place.answers.clear()
        room.snapshots.publish(cards(1))
        labels = await room.put(2)
        assert one.state.value.labels == labels
        assert not one.state.value.in_place
        room.place.answers.set()
        await first(one.state, lambda state: state.in_place)
        room.place.answers.clear()
        room.resync.publish(0.01)
        await room.put(3)
        assert one.state.value.in_place, "they are only checked"


async def test_no_label_is_put_before_the_hardware_is_known(room: Room) -> None:
    room.snapshots.publish(Snapshot())
    async with room.running():
        await asyncio.sleep(0.1)
        assert room.place.puts.value == ()
        room.snapshots.publish(cards(1))
        assert (await room.put(1))["beta.furiosa.ai/npu.count"] == "1"


async def test_hardware_and_sets_are_followed(room: Room) -> None:
    async with room.running():
        await room.put(1)
        room.snapshots.publish(cards(1))
        assert (await room.put(2))["beta.furiosa.ai/npu.count"] == "1"
        room.sets.publish((SETS["alpha"], SETS["current"]))
        third = await room.put(3)
        assert third["furiosa.ai/npu.count"] == "1"
        assert third["alpha.furiosa.ai/npu.family"] == "warboy"
        assert not any(key.startswith("beta.") for key in third)
        room.snapshots.publish(cards(0))
        assert await room.put(4) == {}


async def test_a_reload_of_the_driver_is_one_change_or_none(room: Room) -> None:
    room.timing = LabelTiming(settle=0.5)
    async with room.running():
        await room.put(1)
        for count in (1, 0, 1):
            room.snapshots.publish(cards(count))
            await asyncio.sleep(0.02)
        assert (await room.put(2))["beta.furiosa.ai/npu.count"] == "1"
        assert len(room.place.puts.value) == 2


async def test_labels_that_others_change_are_put_back_and_nothing_else_is_asked(
    room: Room, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda _, most: most)
    room.seen = seen = Feed[Mapping[str, str] | None](None)
    room.timing = LabelTiming(settle=1.0, longest_pause=60.0)
    async with room.running():
        labels = await room.put(1)
        for value in ("1", "2"):
            seen.publish({**labels, "of/another": value})
            for _ in range(20):  # turns of the loop: as many as a put would take, and more
                await asyncio.sleep(0)
        assert len(room.place.puts.value) == 1
        seen.publish({**labels, "beta.furiosa.ai/npu.count": "7"})
        await room.put(2)
        # It stays so: another program writes it, too, and they do not chase each other.
        await room.put(7)
        assert pauses[:6] == [1, 1, 2, 4, 8, 16]
        seen.publish(labels)
        room.snapshots.publish(cards(1))
        assert (await first(room.place.puts, lambda puts: puts[-1][0] != labels))[-1]


async def test_agents_do_not_all_ask_at_the_same_moment(room: Room, pauses: list[float]) -> None:
    async with room.running():
        assert await room.put(1) == await room.put(20)
    assert len(set(pauses)) > 10
    assert all(0.8 * 3600 <= pause <= 1.2 * 3600 for pause in pauses)


async def test_a_refusal_is_reported_once_and_tried_again_with_the_latest_labels(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npu_agent.outputs.labels")
    room.place.refusal = OutputError("no rights: apply k8s/", kind="forbidden")
    async with room.running() as one:
        await room.put(5)
        assert one.state.value.error == "no rights: apply k8s/"
        assert not one.state.value.in_place
        assert one.results["forbidden"] >= 4
        said = [record.message for record in caplog.records]
        assert said.count("cannot apply the labels; retrying") == 1
        room.snapshots.publish(cards(1))
        room.place.refusal = None
        state = await first(one.state, lambda state: state.in_place)
        assert state.error is None
        assert state.labels["beta.furiosa.ai/npu.count"] == "1"
        assert "labels can be applied again" in [r.message for r in caplog.records]


async def test_a_wait_that_is_asked_for_is_kept(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    real = asyncio.sleep

    async def recorded(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    room.place.refusal = OutputError("slow down", kind="too_many", retry_after=7.0)
    monkeypatch.setattr(asyncio, "sleep", recorded)
    async with room.running():
        await room.put(3)
    asked_for = [seconds for seconds in waits if seconds > 1][:2]
    assert all(7.0 <= seconds <= 7.01 for seconds in asked_for)


async def test_a_card_that_cannot_be_read_makes_it_careful(room: Room) -> None:
    room.snapshots.publish(cards(1, UNREAD))
    room.place.answer = Counter(left=2)
    async with room.running() as one:
        await room.put(1)
        assert room.place.puts.value[0][1] is True
        await until(lambda: one.results)
        assert not one.state.value.in_place
        assert one.results == {"left": 1}
        room.place.answer = Counter(written=1)
        room.snapshots.publish(cards(2))
        await room.put(2)
        assert room.place.puts.value[1][1] is False
