"""Cards that the Node's annotation cordons, by both APIs: the whole agent between stand-ins."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from grpclib.exceptions import GRPCError

from npu_agent.agent.agent import Agent
from npu_agent.core.cordon import ANNOTATION
from npu_agent.core.kinds import Problem
from npu_agent.core.problems import notes, problems
from npu_agent.kubelet.cordons import FILE
from npu_agent.outputs.web.status import as_json
from npu_agent.people.simulator.pluginmanager import PrepareError
from npu_agent.wording import of_problem
from tests.kube.helpers import Reply, hangs, status
from tests.outputs.dra.api import DRIVER
from tests.test_agent import NPU, UUIDS
from tests.test_agent_dra import DRA, NAMES, NODE, NOTHING_ELSE, Room, room
from tests.until import first, until

__all__ = ["room"]

ALONE: dict[str, Any] = {**NOTHING_ELSE, "cordon": True}


def of_the_node(agent: Agent) -> list[Problem]:
    return [one for one in problems(agent.state()) if one.subject == "node"]


def cordon(room: Room, **cards: str) -> None:
    room.cluster.annotate(ANNOTATION, json.dumps(cards) if cards else None)


async def test_the_kubelet_has_it_unhealthy_and_everybody_reads_why(room: Room) -> None:
    room.node.cards("warboy=2")
    async with room.node.agent(node_name=NODE, **{**ALONE, "events": True}) as agent:
        await room.node.told(lambda plugin: plugin.healthy() == tuple(UUIDS))
        cordon(room, NPU1="swap fan")
        await room.node.told(lambda plugin: plugin.healthy() == (UUIDS[0],))
        state = agent.state()
        assert state.cordons == {UUIDS[1]: "swap fan"}
        assert not of_the_node(agent)
        (note,) = notes(state)
        assert note.kind == "CardCordoned"
        assert note.facts["reason"] == "swap fan"
        assert of_problem(note, state).command.endswith("uncordon npu1 --node=this-node")
        assert [card["cordoned"] for card in as_json(state)["cards"]] == [None, "swap fan"]
        assert as_json(state)["first_ids"] == {"npu1": UUIDS[1]}
        assert [card.health.state.value for card in state.snapshot.cards] == ["healthy"] * 2
        entry = state.timeline.entries(state.monotonic)[0]
        assert (entry.kind, entry.facts) == ("NPUCordoned", {"reason": "swap fan"})
        cordon(room)
        await room.node.told(lambda plugin: plugin.healthy() == tuple(UUIDS))
        events = room.cluster.objects["/api/v1/namespaces/default/events"]
        await until(
            lambda: {"NPUCordoned", "NPUUncordoned"} <= {each["reason"] for each in events.values()}
        )
        await until(lambda: not (room.node.plugins / FILE).exists())


async def test_an_agent_that_starts_asks_before_it_hands_out(room: Room) -> None:
    room.node.cards("warboy=2")
    cordon(room, npu1="swap fan")
    answer = asyncio.Event()
    room.cluster.instead["watch nodes"] = late(room, answer)
    async with room.node.agent(node_name=NODE, **ALONE):
        await room.node.told(lambda plugin: plugin.healthy() == tuple(UUIDS))
        granted = asyncio.create_task(room.node.kubelet.allocate_ids(NPU, [UUIDS[1]]))
        await asyncio.sleep(0.1)
        assert not granted.done()
        answer.set()
        with pytest.raises(GRPCError, match="is cordoned: swap fan"):
            await granted
        await room.node.told(lambda plugin: plugin.healthy() == (UUIDS[0],))


async def test_the_last_cordons_are_in_force_while_the_api_server_is_away(room: Room) -> None:
    room.node.cards("warboy=2")
    cordon(room, npu1="swap fan")
    async with room.node.agent(node_name=NODE, **ALONE):
        await room.node.told(lambda plugin: plugin.healthy() == (UUIDS[0],))
        await until((room.node.plugins / FILE).exists)
    room.cluster.trouble = hangs
    async with room.node.agent(node_name=NODE, **ALONE):
        plugin = await room.node.told(lambda plugin: plugin.connected and plugin.messages > 0)
        assert plugin.messages == 1
        assert plugin.healthy() == (UUIDS[0],)
        await room.node.kubelet.allocate_ids(NPU, [UUIDS[0]])  # and the other one is served


async def test_garbage_and_missing_rights_are_said_and_uncordon_nothing(room: Room) -> None:
    room.node.cards("warboy=2")
    async with room.node.agent(node_name=NODE, **ALONE) as agent:
        cordon(room, npu1="swap fan")
        await first(agent.allocator.cordons.cards, len)
        room.cluster.annotate(ANNOTATION, "{npu1")
        await first(agent.allocator.cordons.state, lambda now: now.wrong)
        (problem,) = of_the_node(agent)
        assert problem.kind == "CordonUnreadable"
        assert str(problem.facts["error"]).startswith("not JSON")
        assert agent.state().cordons == {UUIDS[1]: "swap fan"}
        cordon(room, npu0="", npu7="")
        await first(agent.allocator.cordons.cards, lambda now: UUIDS[0] in now)
        (problem,) = of_the_node(agent)
        assert (problem.kind, problem.facts["unknown"]) == ("CordonUnknown", ("npu7",))
        room.cluster.trouble = status(403, "nodes is forbidden: User cannot watch resource")
        room.cluster.cut()
        await until(lambda: agent.node.watch.error)
        assert "`npu-agent doctor` shows the command" in str(of_the_node(agent)[-1].facts["error"])


async def test_slices_have_a_taint_and_claims_that_run_go_on(room: Room) -> None:
    room.node.cards("warboy=2")
    runs, late = room.claim("runs", NAMES[1]), room.claim("late", NAMES[1])
    async with room.node.agent(node_name=NODE, **ALONE, allocation=DRA):
        await room.free(*NAMES)
        await room.registered()
        await room.prepared(runs)
        cordon(room, npu1="swap fan")
        await until(room.cluster.taints)
        (taint,) = room.cluster.taints()[NAMES[1]]
        assert (taint["key"], taint["effect"]) == (f"{DRIVER}/cordoned", "NoSchedule")
        await room.prepared(runs)  # the kubelet was restarted
        await room.manager.unprepare(DRIVER, runs)
        with pytest.raises(PrepareError, match="is cordoned: swap fan"):
            await room.prepared(late)
        cordon(room)
        await room.free(*NAMES)
        await room.prepared(late)


async def test_the_config_switches_it_off_and_on(room: Room) -> None:
    room.node.cards("warboy=2")
    cordon(room, npu1="swap fan")
    async with room.node.agent(room.configure(""), node_name=NODE) as agent:
        await room.node.told(lambda plugin: plugin.healthy() == (UUIDS[0],))
        room.configure("cordon: false\n")
        agent.common.poller.read_now()
        await room.node.told(lambda plugin: plugin.healthy() == tuple(UUIDS))


def late(room: Room, answer: asyncio.Event) -> Reply:
    """Answers when it may."""

    async def reply(request: web.Request) -> web.StreamResponse:
        await answer.wait()
        room.cluster.instead.clear()
        return await room.cluster.answer(request)

    return reply
