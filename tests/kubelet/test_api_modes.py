"""When a card counts as having left the device plugin's list, and how fast a config is followed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from npu_agent.core.api_mode import ApiMode, WantedApi, WantedApis
from npu_agent.core.grant import Refusal
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Ledger
from npu_agent.core.offer import advertise
from npu_agent.feed import Feed
from npu_agent.kubelet.allocation_store import AllocationStore, Served
from npu_agent.kubelet.api_modes import ApiModes, Timing
from npu_agent.kubelet.record import recover
from tests.outputs.deviceplugin.helpers import resources, state
from tests.outputs.helpers import Kubelet
from tests.until import first, until

NPU = "beta.furiosa.ai/npu"
CARDS = (state(index=0), state(index=1))


def wishes(wish: WantedApi) -> WantedApis:
    return WantedApis(families={"warboy": wish})


@dataclass
class Room:
    """Two cards, and what kubelet and API server say of them."""

    wanted: Feed[WantedApis] = field(default_factory=lambda: Feed(wishes(WantedApi.PLUGIN)))
    offered: Mapping[str, frozenset[str]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        snapshots = Feed(Snapshot(CARDS, complete=True))
        kubelet = Kubelet()
        self.store = AllocationStore(
            snapshots=snapshots,
            pod_resources=kubelet,
            served=Served(resources=[NPU], drivers=["npu.furiosa.ai"]),
            directory=Path("/nowhere"),
            ledger=kubelet.ledger,
        )
        self.modes = ApiModes(
            snapshots=snapshots,
            wanted=self.wanted,
            store=self.store,
            offered=self._offered,
            allocatable=self._allocatable,
            timing=Timing(ask_first=0.005, ask_longest=0.01),
        )
        (resource,) = resources(NPU, None)
        self.devices = advertise(snapshots.value, resource)

    async def _offered(self) -> Mapping[str, frozenset[str]]:
        self.asked += 1
        return self.offered

    async def _allocatable(self) -> Mapping[str, int]:
        return self.counts

    def where(self) -> list[ApiMode]:
        return list(self.modes.now().values())


@asynccontextmanager
async def running() -> AsyncIterator[Room]:
    room = Room()
    task = asyncio.create_task(room.modes.run())
    try:
        yield room
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns_of_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_list_that_comes_after_the_config_is_noticed() -> None:
    async with running() as room:
        room.modes.listing({NPU: room.devices})
        room.wanted.publish(wishes(WantedApi.DRA))
        await turns_of_the_loop()  # it is found that nothing leaves yet
        assert room.where() == [ApiMode.NOWHERE] * 2
        assert room.asked == 0
        room.modes.listing({NPU: ()})
        await until(lambda: room.where() == [ApiMode.DRA] * 2)


async def test_each_card_has_left_when_nobody_counts_it() -> None:
    one, other = (device.id for device in Room().devices)
    async with running() as room:
        room.offered, room.counts = {NPU: frozenset({one, other})}, {NPU: 2}
        room.modes.listing({NPU: room.devices})
        room.wanted.publish(wishes(WantedApi.DRA))
        room.modes.listing({NPU: ()})
        await until(lambda: room.asked > 2)
        assert room.where() == [ApiMode.NOWHERE] * 2
        room.offered = {NPU: frozenset({other})}
        asked = room.asked
        await until(lambda: room.asked > asked + 2)
        assert room.where() == [ApiMode.NOWHERE] * 2  # the scheduler would send Pods
        room.counts = {}
        await until(lambda: room.where() == [ApiMode.DRA, ApiMode.NOWHERE])
        room.offered = {}
        await until(lambda: room.where() == [ApiMode.DRA] * 2)


async def test_a_claim_for_a_card_that_is_on_its_way_to_dra_waits() -> None:
    """The record could not be read: until it was clear who holds what, the card was listed."""
    device = Room().devices[0]
    async with running() as room:
        room.wanted.publish(wishes(WantedApi.DRA))
        room.store.states.publish(recover(Ledger(), b"{", 0.0))
        await until(lambda: room.where() == [ApiMode.DRAINING_FROM_PLUGIN] * 2)
        room.modes.listing({NPU: room.devices})
        assert room.modes.refusal(device) is None  # the ledger has a reason
        room.store.states.publish(Ledger())
        refused = room.modes.refusal(device)
        assert refused
        assert refused.kind is Refusal.HELD
        assert "from the device plugin to DRA" in str(refused)
        room.modes.listing({NPU: ()})
        await until(lambda: room.where() == [ApiMode.DRA] * 2)
        assert room.modes.refusal(device) is None
        room.wanted.publish(wishes(WantedApi.PLUGIN))
        room.modes.listing({NPU: room.devices})
        await until(lambda: followed(room, WantedApi.PLUGIN))
        refused = room.modes.refusal(device)
        assert refused
        assert refused.kind is Refusal.UNFIT
        assert "delete the Pod" in str(refused)


async def test_a_card_that_is_listed_again_has_not_left() -> None:
    async with running() as room:
        room.modes.listing({NPU: room.devices})
        room.offered = {NPU: frozenset(device.id for device in room.devices)}
        room.wanted.publish(wishes(WantedApi.DRA))
        room.modes.listing({NPU: ()})
        await until(lambda: room.asked)
        room.wanted.publish(wishes(WantedApi.PLUGIN))
        await first(room.modes.wishes, lambda now: now == wishes(WantedApi.PLUGIN))
        room.modes.listing({NPU: room.devices})
        room.offered = {}
        await turns_of_the_loop()
        assert room.modes.listed.value.keys() == {device.card_id for device in room.devices}


def followed(room: Room, wish: WantedApi) -> bool:
    return room.modes.wishes.value == wishes(wish)
