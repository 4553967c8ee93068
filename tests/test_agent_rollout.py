"""Two agents on one node, as at a rollout: no Pod notices which of them serves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from npu_agent.agent.agent import Agent
from npu_agent.agent.parts import AgentTiming
from npu_agent.core.state import SessionPhase
from npu_agent.kubelet.allocator import Allocator
from npu_agent.outputs.dra import service
from npu_agent.people.simulator.pluginmanager import PrepareError
from tests.outputs.dra.api import DRIVER
from tests.test_agent import NPU
from tests.test_agent_dra import DRA, NAMES, NOTHING_ELSE, Room, room
from tests.until import first, until

__all__ = ["room"]  # a fixture
BY_DRA: dict[str, Any] = {"allocation": DRA, **NOTHING_ELSE}


@asynccontextmanager
async def rollout(room: Room) -> AsyncIterator[tuple[AsyncExitStack, Agent]]:
    """An agent that serves, until that context is closed, and one that stands by."""
    async with AsyncExitStack() as before:
        await before.enter_async_context(room.node.agent(**BY_DRA))
        await room.registered()
        await room.free(*NAMES)
        async with room.node.agent(**BY_DRA) as after:
            await first(after.kubelet.driver.status, lambda now: now.phase is SessionPhase.STANDBY)
            yield before, after


async def test_each_claim_finds_a_driver_during_a_rollout(room: Room) -> None:
    room.node.cards("warboy=2")
    ref = room.claim("c", NAMES[0])
    async with rollout(room) as (before, after):
        (old,) = room.manager.instances.value
        ended = asyncio.create_task(before.aclose())
        while after.kubelet.driver.status.value.phase is not SessionPhase.REGISTERED:
            await room.prepared(ref)
            await room.manager.unprepare(DRIVER, ref)
        await ended
        await first(room.manager.instances, lambda now: old not in now and len(now) == 1)
        await room.prepared(ref)
        assert room.specs()
    assert room.manager.failures == []


async def test_the_health_is_reported_by_the_one_that_serves(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet has one memory for all, and clears it when the stream of one ends."""
    monkeypatch.setattr(service, "until_tick", lambda _: 1000.0)  # no heartbeat
    room.node.cards("warboy=2")
    async with rollout(room) as (before, after):
        await before.aclose()
        await first(after.kubelet.driver.status, lambda now: now.phase is SessionPhase.REGISTERED)
        await until(lambda: room.manager.state(DRIVER, "this-node", NAMES[0])[0] == "Healthy")


def waiting(
    monkeypatch: pytest.MonkeyPatch, owner: object, method: str
) -> tuple[asyncio.Event, asyncio.Event]:
    """Has a method wait: the first event is set once it is called, the second has it go on."""
    called, goes_on = asyncio.Event(), asyncio.Event()
    good = getattr(owner, method)

    async def waits(*args: Any) -> Any:
        called.set()
        await goes_on.wait()
        return await good(*args)

    monkeypatch.setattr(owner, method, waits)
    return called, goes_on


async def test_a_call_that_is_under_way_is_answered_before_the_end(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.node.cards("warboy=2")
    async with AsyncExitStack() as before:
        agent = await before.enter_async_context(room.node.agent(**BY_DRA))
        await room.registered()
        await room.free(*NAMES)
        called, goes_on = waiting(monkeypatch, agent.kubelet.driver.claims, "prepare")
        prepared = asyncio.create_task(room.prepared(room.claim("c", NAMES[0])))
        await called.wait()
        ended = asyncio.create_task(before.aclose())
        await asyncio.wait([ended], timeout=0.3)
        goes_on.set()
        assert len(await prepared) == 1
        await ended


async def test_a_call_that_waits_for_a_holder_does_not_keep_the_agent(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.node.timing = AgentTiming(calls=0.05)
    room.node.cards("warboy=2")
    async with AsyncExitStack() as before:
        agent = await before.enter_async_context(room.node.agent(**BY_DRA))
        await room.registered()
        called, _ = waiting(monkeypatch, agent.kubelet.driver.claims, "prepare")
        prepared = asyncio.create_task(room.prepared(room.claim("c", NAMES[0])))
        await called.wait()
        await before.aclose()
        with pytest.raises(PrepareError):
            await prepared


async def test_an_allocate_that_is_under_way_is_answered_before_the_end(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.node.cards("warboy=2")
    called, goes_on = waiting(monkeypatch, Allocator, "grant")
    async with AsyncExitStack() as before:
        await before.enter_async_context(room.node.agent(**NOTHING_ELSE))
        await room.node.listed(2)
        granted = asyncio.create_task(room.node.kubelet.allocate(NPU, 1))
        await called.wait()
        ended = asyncio.create_task(before.aclose())
        await asyncio.wait([ended], timeout=0.3)
        goes_on.set()
        assert len((await granted).ids) == 1
        await ended


@pytest.mark.parametrize("several", [True, False], ids=["1.37", "before"])
async def test_each_pod_is_admitted_during_a_rollout_by_the_device_plugin(
    room: Room, several: bool
) -> None:
    room.node.cards("warboy=2")
    kubelet = room.node.kubelet
    kubelet.several = several
    async with AsyncExitStack() as before:
        await before.enter_async_context(room.node.agent(**NOTHING_ELSE))
        await room.node.listed(2)
        async with room.node.agent(**NOTHING_ELSE) as after:
            (session,) = (one for one in after.kubelet.sessions if one.status.value.resource == NPU)
            await first(session.status, lambda now: now.phase is SessionPhase.STANDBY)
            ended = asyncio.create_task(before.aclose())
            while session.status.value.phase is not SessionPhase.REGISTERED:
                grant = await kubelet.allocate(NPU, 1)
                kubelet.release(NPU, grant.ids)
            await ended
            plugin = kubelet.plugins.value[NPU]
            assert plugin.connected
            assert session.counts.returns == 0
            # A drop by the kubelet is noticed, long before the agent asks what is offered.
            kubelet.hang_up(NPU)
            await first(session.status, lambda now: now.registrations == 2)
            await room.node.listed(2)
        assert not kubelet.plugins.value[NPU].connected
