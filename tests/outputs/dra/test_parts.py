"""Claims for parts of cards: what a container is given, and what it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from npu_agent.core.pool import PoolDevice
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.dra.room import NPU, Room, ref, result

CARD = "npu-rngd-0"


async def room_with_a_card(directory: Path, *held: str) -> Room:
    room = Room(directory, state("rngd", 0))
    await room.owned(*held)
    return room


async def prepared(room: Room, name: str, *cores: str) -> Any:
    """What the kubelet is answered for a claim of these parts of the card; "" is all of it."""
    devices = [f"{CARD}-cores-{each}" if each else CARD for each in cores]
    room.claim(name, *map(result, devices))
    return await room.prepared(name)


def granted(room: Room, name: str) -> tuple[list[str], list[str]]:
    """Of the claim's one device: its variables, and the nodes of cores."""
    path = room.cdi_root / f"furiosa.ai-claim-{ref(name).uid}.json"
    (device,) = json.loads(path.read_text())["devices"]
    edits = device["containerEdits"]
    nodes = [node["path"] for node in edits["deviceNodes"]]
    return edits["env"], sorted(node for node in nodes if "pe" in node)


async def test_a_container_is_given_its_part_and_nothing_of_the_others(tmp_path: Path) -> None:
    """That no core is given twice, whatever comes and goes, is the device plugin's test_exclusive.

    What is free is given, in whatever parts it was before.
    """
    room = await room_with_a_card(tmp_path)
    for name, cores in (("a", "0-3"), ("b", "4-5"), ("c", "6"), ("d", "7")):
        (one,) = await prepared(room, name, cores)
        assert one.device_name == f"{CARD}-cores-{cores}"
    assert granted(room, "b") == (
        ["NPU_DEVNAME=npu0pe4-5", "FURIOSA_DEVICES=npu:0:4-5"],
        ["/dev/rngd/npu0pe4", "/dev/rngd/npu0pe4-5", "/dev/rngd/npu0pe5"],
    )
    assert granted(room, "d") == (
        ["NPU_DEVNAME=npu0pe7", "FURIOSA_DEVICES=npu:0:7"],
        ["/dev/rngd/npu0pe7"],
    )
    for name in ("b", "c"):
        await room.unprepared(name)
    assert isinstance(await prepared(room, "e", "4-7"), str)
    for name, cores in (("f", "4"), ("g", "5"), ("h", "6")):
        assert not isinstance(await prepared(room, name, cores), str)


async def test_one_claim_may_not_have_a_core_twice(tmp_path: Path) -> None:
    room = await room_with_a_card(tmp_path)
    refused = await prepared(room, "a", "0-1", "1")
    assert "has the same cores twice" in refused
    assert room.allocator.prepared.value == {}
    (first, second) = await prepared(room, "a", "0-1", "2")
    assert (first.device_name, second.device_name) == (f"{CARD}-cores-0-1", f"{CARD}-cores-2")


async def test_what_the_device_plugin_has_given_away_is_refused(tmp_path: Path) -> None:
    room = await room_with_a_card(tmp_path, "RNGD-0_cores_0-3")
    refused = await prepared(room, "a", "2-3")
    assert f"Pod team/train still holds its cores as RNGD-0_cores_0-3 of {NPU}" in refused
    assert not isinstance(await prepared(room, "a", "4-7"), str)


async def test_a_core_without_a_node_is_refused_to_those_that_need_it(tmp_path: Path) -> None:
    room = Room(tmp_path, state("rngd", 0, missing=("pe4", "pe4-5", "pe4-7")))
    await room.owned()
    assert "/dev/rngd/npu0pe4 is missing" in await prepared(room, "a", "4-7")
    assert not isinstance(await prepared(room, "b", "6-7"), str)


def held(room: Room, listed: tuple[PoolDevice, ...]) -> set[str]:
    """Names of the devices that the scheduler must not allocate, of those in the pool."""
    here, names = room.allocator.facts(), {one.name for one in listed}
    conflicts = here.ledger.conflicts(here.cards, without=names)
    return {one.name for one in listed if conflicts.against(None, one.device)}


async def test_a_part_that_is_no_longer_in_the_pool_keeps_its_card(tmp_path: Path) -> None:
    """The scheduler counts the cores of the devices that it sees."""
    room = await room_with_a_card(tmp_path)
    await prepared(room, "a", "0-3")
    parts = room.devices.value or ()
    whole = tuple(one for one in parts if not one.is_part)
    assert held(room, parts) == set()
    assert held(room, whole) == {CARD}
    await room.unprepared("a")
    assert held(room, whole) == set()
    await prepared(room, "b", "")
    assert held(room, parts) == set()
