"""Each documented Event: a running agent on a simulated host sends it for what the table names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from npu_agent.agent.agent import Agent
from npu_agent.config import MetricsConfig
from npu_agent.config.schema import HealthConfig
from npu_agent.core import trends
from npu_agent.core.problems import problems
from npu_agent.core.timeline import ENTRIES
from npu_agent.people.simulator.pluginmanager import StandInPluginManager
from tests.test_agent import NPU, rewrite
from tests.test_agent_cordons import cordon
from tests.test_agent_dra import DRA, NODE, NOTHING_ELSE, Room, room
from tests.until import until

__all__ = ["room"]

EVENTS = "/api/v1/namespaces/default/events"
LOUD: dict[str, Any] = {
    **NOTHING_ELSE,
    "events": True,
    "interval": 0.1,
    "cordon": True,
    "health": HealthConfig(interval=0.05, slow_after=0.1),
    "metrics": MetricsConfig(listen="127.0.0.1:0", interval=0.1),
}


class Case(NamedTuple):
    """What brings an Event about, what ends it, and the Event of the end."""

    cards: str
    begin: Callable[[Room], None]
    end: Callable[[Room], None] | None = None
    ended: str = ""


def faults(*steps: str) -> Callable[[Room], None]:
    """``npu0 dead``: does these to cards, one after the other."""

    def act(room: Room) -> None:
        for step in steps:
            room.node.fault(*step.split())

    return act


OK = faults("npu0 ok")
TABLE: dict[str, Case] = {
    "NPUUnhealthy": Case("rngd=2", faults("npu0 dead"), OK, "NPURecovered"),
    "NPURemoved": Case("rngd=2", faults("npu0 gone"), faults("npu0 back"), "NPUAdded"),
    "NPUExchanged": Case("rngd=2", faults("npu0 swap")),
    "NPUHot": Case("rngd=2", faults("npu0 hot"), OK, "NPUCooled"),
    "NPUErrorsRising": Case("warboy=2", faults("npu0 errors"), OK, "NPUErrorsQuiet"),
    "NPUHardwareError": Case("rngd=2", faults("npu0 errors"), OK, "NPUErrorsQuiet"),
    "NPULinkSlow": Case("rngd=2", faults("npu0 narrow"), OK, "NPULinkRestored"),
    "NPUSlow": Case("rngd=2", faults("npu0 slow"), OK, "NPUNotSlow"),
    "NPUSameUUID": Case(
        "rngd=2", faults("npu0 twin", "npu1 twin"), faults("npu0 swap"), "NPUOwnUUID"
    ),
    "NPUCordoned": Case(
        "rngd=2", lambda room: cordon(room, npu0="swap fan"), cordon, "NPUUncordoned"
    ),
}
"""By reason; those below are tests of their own."""
FLAPPING = {"NPUFlapping", "NPUSteady"}
CONFIG = {"ConfigRejected"}
LOST = {"NPULost"}
DRIVER = {"DRANotServed"}
PODS = {"PodEvicted", "PodNotEvicted"}


def reasons(room: Room) -> set[str]:
    return {event["reason"] for event in room.cluster.objects[EVENTS].values()}


async def sent(room: Room, reason: str) -> None:
    await until(lambda: reason in reasons(room), reason)


async def read(agent: Agent) -> None:
    """Returns when the agent has read both cards: what it finds at its start is no news."""
    agent.hardware.readers.touch()  # else it reads them once a minute
    await until(lambda: [card.reading is None for card in cards(agent)] == [False] * 2)


def cards(agent: Agent) -> tuple[Any, ...]:
    return agent.inventory.snapshots.value.cards


def test_the_table_has_each_documented_event_and_the_code_has_no_other() -> None:
    tried = (
        {*TABLE, *(case.ended for case in TABLE.values())}
        | FLAPPING
        | LOST
        | CONFIG
        | DRIVER
        | PODS
    )
    page = (Path(__file__).parents[1] / "docs/cli.md").read_text(encoding="utf-8")
    section = page.partition("### Events of the Node")[2].partition("\n### ")[0]
    documented = re.findall(r"`((?:NPU|DRA|Config|Pod)[A-Z]\w+)`", section)
    assert set(documented) == tried - {""}
    in_code = {kind for kind, traits in ENTRIES.items() if traits.is_event}
    assert in_code == set(documented)


@pytest.mark.parametrize("reason", TABLE)
async def test_a_running_agent_sends_the_event(
    room: Room, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trends, "_QUIET", 0.3)
    case = TABLE[reason]
    room.node.cards(case.cards)
    async with room.node.agent(node_name=NODE, **LOUD) as agent:
        await read(agent)
        case.begin(room)
        await sent(room, reason)
        if case.end:
            case.end(room)
            await sent(room, case.ended)


async def test_a_running_agent_sends_that_a_card_flaps(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trends, "_STEADY", 0.3)
    room.node.cards("rngd=2")
    async with room.node.agent(node_name=NODE, **LOUD) as agent:
        await read(agent)
        for _ in range(3):
            for fault, state in (("dead", "unhealthy"), ("ok", "healthy")):
                room.node.fault("npu0", fault)
                await until(lambda state=state: cards(agent)[0].health.state.value == state)  # type: ignore[misc]
        for reason in sorted(FLAPPING):
            await sent(room, reason)


async def test_a_running_agent_sends_that_a_card_was_lost_while_no_agent_ran(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    """By the name that people know, from the record of the agent before."""
    room.node.cards("rngd=2")
    async with room.node.agent(node_name=NODE, **LOUD) as agent:
        await read(agent)
        name = f"npu1 ({cards(agent)[1].card.pci_bus_id})"
        await room.node.listed(2)
        await room.node.kubelet.allocate(NPU, 1)  # else it leaves no record
    room.node.fault("npu1", "gone")
    async with room.node.agent(node_name=NODE, **LOUD) as agent:
        await sent(room, "NPULost")
        (event,) = room.cluster.objects[EVENTS].values()
        assert event["message"].startswith(f"{name} is gone: it was lost while no agent ran: ")
        state = agent.state()
        assert "NPULost" in [entry.kind for entry in state.timeline.entries(state.monotonic)]
        assert [problem.facts["earlier"] for problem in problems(state)] == [(name,)]
    assert "card lost while no agent ran" in caplog.messages


async def test_a_running_agent_sends_that_a_config_is_refused(room: Room) -> None:
    room.node.cards("rngd=2")
    file = room.configure("")
    rewrite(file, good := file.read_text(encoding="utf-8").replace("events: false", "events: true"))
    async with room.node.agent(file, node_name=NODE) as agent:
        await read(agent)
        rewrite(file, f"{good}nonsense: 1\n")
        await sent(room, "ConfigRejected")


async def test_a_running_agent_sends_that_the_kubelet_refuses_its_driver(room: Room) -> None:
    await room.manager.stop()
    old = StandInPluginManager(room.root, service="v0.DRAPlugin")
    await old.start()
    room.node.cards("rngd=2")
    async with room.node.agent(node_name=NODE, allocation=DRA, **LOUD):
        await sent(room, "DRANotServed")
    await old.stop()
