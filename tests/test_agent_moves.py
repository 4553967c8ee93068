"""The whole agent, restarted with another API in its config while Pods of the first one run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest

from npu_agent.agent.agent import Agent
from npu_agent.config import poller
from npu_agent.config.schema import AllocationConfig
from npu_agent.core.problems import notes
from npu_agent.people.simulator.pluginmanager import PrepareError
from npu_agent.supervise import background
from tests.kube.helpers import drops, status
from tests.outputs.dra.api import DRIVER
from tests.test_agent import NPU, UUIDS
from tests.test_agent_dra import DRA, NAMES, NOTHING_ELSE, Room, reasons, room, timing
from tests.until import first, until

__all__ = ["room"]  # a fixture
PLUGIN = AllocationConfig(api="device-plugin")


@pytest.fixture(autouse=True)
def quick(room: Room) -> None:
    room.node.cards("warboy=2")
    times(room)


def times(room: Room, **drivers: float) -> None:
    """Sets the times of agents that start from now on, of which these are their drivers'."""
    room.node.timing = replace(
        timing(**{"socket_check": 0.05, **drivers}),
        config=poller.PollTiming(every=0.02, settle=0.0),
    )


def agent_of(room: Room, allocation: AllocationConfig) -> AbstractAsyncContextManager[Agent]:
    return room.node.agent(allocation=allocation, **NOTHING_ELSE)


async def listed(room: Room, *uuids: str) -> None:
    """Waits until the kubelet offers exactly these."""
    await room.node.told(lambda plugin: set(plugin.healthy()) == set(uuids))


@pytest.fixture
async def never_both(room: Room) -> AsyncIterator[None]:
    """At no moment kubelet and API server both offer a card."""
    both: list[set[str]] = []

    async def follow() -> None:
        while True:
            plugin = room.node.kubelet.plugins.value.get(NPU)
            names = {f"npu-{uuid.lower()}" for uuid in (plugin.healthy() if plugin else ())}
            if names := names & room.cluster.devices().keys():
                both.append(names)
            await asyncio.sleep(0)

    async with background(follow()):
        yield
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

    async with background(follow()):
        yield


@pytest.mark.usefixtures("never_both")
async def test_free_cards_move_and_come_back(room: Room) -> None:
    async with agent_of(room, PLUGIN):
        await listed(room, *UUIDS)
        assert room.cluster.calls == []
    async with agent_of(room, DRA) as agent:
        await room.free(*NAMES)
        await until(lambda: reasons(agent) == [])
        ref = room.claim("c", NAMES[0])
        await room.prepared(ref)
        await room.manager.unprepare(DRIVER, ref)
    async with agent_of(room, PLUGIN) as agent:
        await listed(room, *UUIDS)
        assert list(room.cluster.devices()) == []
        await until(lambda: reasons(agent) == [])
        assert agent.state().dra == ()
        # The scheduler allocated this one just before the slice was gone.
        late = room.claim("late", NAMES[0])
        await room.prepared(late)
        await listed(room, UUIDS[1])
        await room.manager.unprepare(DRIVER, late)
        await listed(room, *UUIDS)
        assert (await room.node.kubelet.allocate(NPU, 2)).ids


@pytest.mark.usefixtures("never_both")
async def test_a_card_that_a_pod_holds_is_for_claims_when_it_has_ended(room: Room) -> None:
    async with agent_of(room, PLUGIN) as agent:
        await listed(room, *UUIDS)
        grant = await room.node.kubelet.allocate(NPU, 1)
        here = UUIDS.index(grant.ids[0])
        # A Pod that ends before an answer has shown it is taken to start for a minute.
        await until(lambda: agent.state().usages)
    async with agent_of(room, DRA) as agent:
        # Its Pod keeps it, and a kubelet starts its containers again.
        await room.node.told(lambda plugin: plugin.devices == ((UUIDS[here], "Unhealthy"),))
        await until(lambda: [*room.cluster.taints()] == [NAMES[here]])
        assert [taint["key"] for taint in room.cluster.taints()[NAMES[here]]] == [f"{DRIVER}/held"]
        await until(lambda: reasons(agent) == [])
        (withheld,) = [
            str(note.facts["reason"])
            for note in notes(agent.state())
            if note.kind == "DeviceWithheld"
        ]
        assert "the device plugin does not offer its card (allocation.api); Pod" in withheld
        await room.prepared(room.claim("free", NAMES[1 - here]))
        with pytest.raises(PrepareError, match="still holds its cores as"):
            await room.prepared(room.claim("c", NAMES[here]))
        room.node.kubelet.release(NPU, grant.ids)
        await room.free(*NAMES)
        await room.prepared(room.claim("c", NAMES[here]))


@pytest.mark.usefixtures("never_both")
async def test_a_card_that_a_claim_holds_is_listed_when_it_is_unprepared(room: Room) -> None:
    held = room.claim("held", NAMES[0])
    await room.prepared_before(held)
    async with agent_of(room, PLUGIN) as agent:
        await listed(room, UUIDS[1])
        assert list(room.cluster.devices()) == []
        (withheld,) = [
            str(note.facts["reason"])
            for note in notes(agent.state())
            if note.kind == "DeviceWithheld"
        ]
        assert "Pod team/pod-held (ResourceClaim team/held) still holds its cores" in withheld
        assert (await room.prepared(held))[0].device_name == NAMES[0]  # the kubelet was restarted
        await room.manager.unprepare(DRIVER, held)
        await listed(room, *UUIDS)
        assert agent.state().dra == ()


async def test_while_the_api_server_is_away_cards_stay_in_their_slice(room: Room) -> None:
    async with agent_of(room, DRA):
        await room.registered()
        await room.free(*NAMES)
    room.cluster.trouble = drops
    async with agent_of(room, PLUGIN) as agent:
        plugin = await room.node.told(lambda plugin: len(plugin.devices) == 2)
        assert plugin.healthy() == ()
        await first(agent.kubelet.driver.slices.state, lambda state: state.trouble)
        assert list(room.cluster.devices()) == NAMES
        room.cluster.trouble = None
        await listed(room, *UUIDS)
        assert list(room.cluster.devices()) == []


@pytest.mark.usefixtures("never_both")
async def test_without_the_right_to_see_slices_they_are_gone_after_a_while(room: Room) -> None:
    """The component of DRA was removed: the kubelet deletes the slices of a driver that is gone."""
    async with agent_of(room, DRA):
        await room.registered()
        await room.free(*NAMES)
    room.cluster.instead["list"] = status(403, "not allowed")
    await first(room.manager.instances, lambda now: not now)
    times(room, withdraw_timeout=1.5, linger=0.0)
    async with agent_of(room, PLUGIN) as agent, deletes_slices(room, after=0.1):
        await until(lambda: agent.kubelet.driver.slices.no_access)
        waiting = "waiting for the kubelet to delete them"
        await until(lambda: any(waiting in one for one in reasons(agent)))
        await listed(room, *UUIDS)
        assert agent.state().dra == ()
        await until(lambda: reasons(agent) == [])
