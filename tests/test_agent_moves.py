"""The whole agent while its cards move between device plugin and DRA, with Pods that run on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from grpclib.exceptions import GRPCError

from npu_agent.agent import Agent
from npu_agent.config import poller
from npu_agent.kubelet import api_modes
from npu_agent.people.simulator.apiserver import drops, status
from npu_agent.people.simulator.pluginmanager import PrepareError
from tests.outputs.dra.api import DRIVER
from tests.test_agent import NPU, UUIDS
from tests.test_agent_dra import NAMES, Room, reasons, room, timing
from tests.until import first, until

__all__ = ["room"]  # a fixture
PLUGIN, DRA, AUTO = "device-plugin", "dra", "auto"


@pytest.fixture(autouse=True)
def quick(room: Room) -> None:
    times(room)


def times(room: Room, **drivers: float) -> None:
    """Sets the times of agents that start from now on, of which these are their drivers'."""
    room.node.timing = replace(
        timing(**{"grace": 0.05, "look_every": 0.05, **drivers}),
        config=poller.Timing(every=0.02, settle=0.0),
        modes=api_modes.Timing(ask_first=0.02),
    )


class Moving:
    """A node with two cards whose config is a file."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.file = room.root / "config.yaml"
        room.node.cards("warboy=2")

    def configure(self, api: str, more: str = "") -> None:
        new = self.file.with_suffix(".new")
        new.write_text(f"""\
pluginDir: {self.room.node.plugins}
allocation: {{api: {api}{more}}}
health: {{interval: 0.05}}
metrics: {{listen: '127.0.0.1:0', interval: 1}}
labels: {{output: none}}
events: false
cordon: false
""")
        new.rename(self.file)

    @asynccontextmanager
    async def agent(self, api: str) -> AsyncIterator[Agent]:
        self.configure(api)
        async with self.room.node.agent(config_file=self.file) as agent:
            yield agent

    async def listed(self, *uuids: str) -> None:
        """The kubelet offers exactly these."""
        await self.room.node.told(lambda plugin: set(plugin.healthy()) == set(uuids))

    def by_both(self) -> set[str]:
        """The cards that the kubelet and the API server offer at this moment."""
        plugin = self.room.node.kubelet.plugins.value.get(NPU)
        listed = {f"npu-{uuid.lower()}" for uuid in (plugin.healthy() if plugin else ())}
        return listed & set(self.room.cluster.devices())


@pytest.fixture
def moving(room: Room) -> Moving:
    return Moving(room)


@asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Does it until the context ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def never_both(moving: Moving) -> AsyncIterator[None]:
    """No card is offered by both while the context is open."""
    both: list[set[str]] = []

    async def follow() -> None:
        while True:
            if found := moving.by_both():
                both.append(found)
            await asyncio.sleep(0)

    try:
        async with meanwhile(follow()):
            yield
    finally:
        assert not both


@asynccontextmanager
async def deletes_slices(room: Room, *, after: float) -> AsyncIterator[None]:
    """The kubelet deletes the slices of a driver that it has not had for so many seconds."""

    async def follow() -> None:
        await room.registered()
        while True:
            await first(room.manager.instances, lambda now: not now)
            await asyncio.sleep(after)
            if not room.manager.instances.value:
                return room.cluster.delete()

    async with meanwhile(follow()):
        yield


async def test_free_cards_move_and_come_back(moving: Moving) -> None:
    room = moving.room
    async with moving.agent(PLUGIN) as agent, never_both(moving):
        await moving.listed(*UUIDS)
        assert room.cluster.calls == []
        moving.configure(DRA)
        await moving.listed()
        await room.free(*NAMES)
        await until(lambda: reasons(agent) == [])
        assert agent.state().moving == {}
        assert agent.state().config.waiting == ()
        ref = room.claim("c", NAMES[0])
        await room.prepared(ref)
        await room.manager.unprepare(DRIVER, ref)
        moving.configure(PLUGIN)
        await moving.listed(*UUIDS)
        assert list(room.cluster.devices()) == []
        await until(lambda: reasons(agent) == [])
        await until(lambda: agent.state().dra == ())
        assert (await room.node.kubelet.allocate(NPU, 2)).ids


async def test_a_card_that_a_pod_holds_follows_when_it_has_ended(moving: Moving) -> None:
    room = moving.room
    async with moving.agent(PLUGIN) as agent, never_both(moving):
        await moving.listed(*UUIDS)
        grant = await room.node.kubelet.allocate(NPU, 1)
        here = UUIDS.index(grant.ids[0])
        # A Pod that ends before an answer has shown it is taken to start for a minute.
        await until(lambda: agent.state().usages)
        moving.configure(DRA)
        await room.free(NAMES[1 - here])
        # Its Pod keeps it, and nobody else is given it: not by the next agent, either.
        await room.node.told(lambda plugin: plugin.devices == ((UUIDS[here], "Unhealthy"),))
        await until(lambda: reasons(agent) == [])
        assert [*agent.state().moving] == [UUIDS[here]]
        await room.registered()
        with pytest.raises(PrepareError, match="still holds its cores as"):
            await room.prepared(room.claim("c", NAMES[here]))
        room.node.kubelet.release(NPU, grant.ids)
        await room.free(*NAMES)
        await room.prepared(room.claim("c", NAMES[here]))


async def test_a_card_that_a_claim_holds_follows_when_it_is_unprepared(moving: Moving) -> None:
    room = moving.room
    ref = room.claim("c", NAMES[0])
    async with moving.agent(DRA) as agent, never_both(moving):
        await room.registered()
        await room.prepared(ref)
        moving.configure(PLUGIN)
        await moving.listed(UUIDS[1])
        assert list(room.cluster.devices()) == [NAMES[0]]
        (taint,) = room.cluster.taints()[NAMES[0]]
        assert (taint["key"], taint["effect"]) == (f"{DRIVER}/moving", "NoSchedule")
        assert [*agent.state().moving] == [UUIDS[0]]
        assert (await room.prepared(ref))[0].device == NAMES[0]  # after a restart of the kubelet
        await room.manager.unprepare(DRIVER, ref)
        await moving.listed(*UUIDS)


async def test_who_has_an_old_view_is_refused_with_the_reason(moving: Moving) -> None:
    room = moving.room
    ref = room.claim("held", NAMES[1])
    async with moving.agent(DRA) as agent:
        await room.registered()
        await room.prepared(ref)
        moving.configure(PLUGIN)
        await moving.listed(UUIDS[0])
        with pytest.raises(PrepareError, match="moved to the device plugin"):
            await room.prepared(room.claim("c", NAMES[0]))
        moving.configure(DRA)
        await room.offered(*NAMES)
        with pytest.raises(GRPCError, match="moved to DRA"):
            await room.node.kubelet.allocate_ids(NPU, [UUIDS[0]])
        (device,) = [
            one.device for one in agent.drivers[0].offered.value or () if one.name == NAMES[0]
        ]
        with pytest.raises(Exception, match="moved to DRA"):
            agent.store.grant(NPU, [device])


async def test_a_claim_that_was_allocated_just_before_its_card_left_is_prepared(
    moving: Moving,
) -> None:
    room = moving.room
    times(room, grace=600.0)
    async with moving.agent(DRA) as agent:
        await room.registered()
        await room.free(*NAMES)
        moving.configure(PLUGIN)
        await room.offered()
        assert isinstance(await room.prepared(room.claim("c", NAMES[0])), tuple)
        assert not agent.modes.listed.value
        await first(agent.store.prepared, lambda claims: "uid-c" in claims)


async def test_no_card_leaves_the_device_plugin_where_dra_is_impossible(moving: Moving) -> None:
    room = moving.room
    room.cluster.groups.clear()
    async with moving.agent(PLUGIN) as agent:
        await moving.listed(*UUIDS)
        moving.configure(DRA)
        await until(lambda: any("does not serve resource" in one for one in reasons(agent)))
        await moving.listed(*UUIDS)
        moving.configure(AUTO)
        await until(lambda: reasons(agent) == [])
        assert agent.state().moving == {}
        await moving.listed(*UUIDS)


async def test_auto_is_found_out_while_running(moving: Moving) -> None:
    room = moving.room
    async with moving.agent(PLUGIN), never_both(moving):
        await moving.listed(*UUIDS)
        room.cluster.trouble = drops
        moving.configure(AUTO)
        await until(lambda: len(room.cluster.calls) > 1)  # it goes on asking
        await moving.listed(*UUIDS)
        room.cluster.trouble = None
        await room.free(*NAMES)


async def test_one_node_of_many(moving: Moving) -> None:
    room = moving.room
    async with moving.agent(PLUGIN), never_both(moving):
        await moving.listed(*UUIDS)
        moving.configure(PLUGIN, ", nodes: [{nodeName: another, api: dra}]")
        moving.configure(PLUGIN, ", nodes: [{nodeName: this-node, api: dra}]")
        await room.free(*NAMES)
        moving.configure(DRA, ", nodes: [{nodeName: this-node, api: device-plugin}]")
        await moving.listed(*UUIDS)


async def test_while_the_api_server_is_away_cards_stay_in_their_slice(moving: Moving) -> None:
    room = moving.room
    async with moving.agent(DRA) as agent:
        await room.registered()
        await room.free(*NAMES)
        room.cluster.instead["apply"] = status(503, "away")
        moving.configure(PLUGIN)
        await until(lambda: len(agent.state().moving) == 2)
        await until(lambda: not agent.drivers[0].slices.state.value.published)
        assert not agent.modes.listed.value
    # Nor does the next agent take them, whatever its config says.
    room.cluster.trouble = drops
    async with moving.agent(PLUGIN) as agent:
        await first(agent.store.asked, lambda asked: asked)
        await first(agent.drivers[0].slices.state, lambda state: state.trouble)
        assert not agent.modes.listed.value
        assert list(room.cluster.devices()) == NAMES
        room.cluster.trouble = None
        room.cluster.instead.clear()
        async with never_both(moving):
            await moving.listed(*UUIDS)
        assert list(room.cluster.devices()) == []


async def test_without_the_right_to_see_slices_they_are_gone_after_a_while(moving: Moving) -> None:
    """The component of DRA was removed: the kubelet deletes the slices of a driver that is gone."""
    room = moving.room
    async with moving.agent(DRA):
        await room.registered()
        await room.free(*NAMES)
    room.cluster.instead["list"] = status(403, "not allowed")
    async with moving.agent(PLUGIN) as agent:
        await until(lambda: agent.drivers[0].slices.no_access)
        assert not agent.modes.listed.value
    await first(room.manager.instances, lambda now: not now)
    times(room, wiped=1.5)
    async with moving.agent(PLUGIN) as agent, never_both(moving), deletes_slices(room, after=0.1):
        await moving.listed(*UUIDS)
        assert agent.state().dra == ()
        await until(lambda: reasons(agent) == [])


async def test_without_the_right_to_see_slices_the_driver_comes_back_when_it_is_needed(
    moving: Moving,
) -> None:
    room = moving.room
    async with moving.agent(DRA):
        await room.registered()
        await room.free(*NAMES)
    room.cluster.instead["list"] = status(403, "not allowed")
    async with moving.agent(PLUGIN) as agent, never_both(moving):
        await until(lambda: agent.drivers[0].slices.no_access)
        await first(room.manager.instances, lambda now: not now)
        waiting = "waiting for the kubelet to delete them"
        await until(lambda: any(waiting in one for one in reasons(agent)))
        moving.configure(DRA)
        await room.registered()
        room.cluster.instead.clear()
        await room.prepared(room.claim("c", NAMES[0]))


async def test_without_the_right_to_see_slices_the_last_claim_is_answered_for(
    moving: Moving,
) -> None:
    """A kubelet that has not got the answer asks again, and needs the driver for that."""
    room = moving.room
    times(room, linger=1.0)
    ref = room.claim("c", NAMES[0])
    async with moving.agent(DRA):
        await room.registered()
        await room.prepared(ref)
    await first(room.manager.instances, lambda now: not now)
    room.cluster.instead["list"] = status(403, "not allowed")
    async with moving.agent(PLUGIN) as agent:
        await room.registered()
        await until(lambda: agent.drivers[0].slices.no_access)
        await room.manager.unprepare(DRIVER, ref)
        since = time.monotonic()
        await first(room.manager.instances, lambda now: not now)
        assert time.monotonic() - since > 0.5


def in_force(agent: Agent, api: str) -> bool:
    return agent.poller.configs.value.allocation.api == api


async def test_a_config_that_goes_to_and_fro_is_followed_in_the_end(moving: Moving) -> None:
    room = moving.room
    async with moving.agent(DRA) as agent, never_both(moving):
        await room.free(*NAMES)
        for api in [PLUGIN, DRA, PLUGIN, DRA, PLUGIN]:
            moving.configure(api)
            agent.poller.read_now()
            await until(partial(in_force, agent, api))
        await moving.listed(*UUIDS)


async def test_cards_that_are_all_sick_do_not_open_the_way_for_claims(moving: Moving) -> None:
    """A scheduler turns to DRA where nothing of the resource is allocatable."""
    room = moving.room
    async with moving.agent(PLUGIN) as agent:
        await moving.listed(*UUIDS)
        for card in ("npu0", "npu1"):
            room.node.fault(card, "dead")
        await moving.listed()
        assert room.cluster.calls == []
        assert agent.state().dra == ()
