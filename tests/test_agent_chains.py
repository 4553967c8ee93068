"""The chains of docs/dev/architecture.md are those that a live agent runs through."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp

import npu_agent
from npu_agent.config.schema import LabelsConfig
from tests.docs.pages import page
from tests.test_agent import NPU, Node, node
from tests.test_agent_dra import DRA, NAMES, NOTHING_ELSE, Room, room
from tests.until import first

__all__ = ["node", "room"]

PAGE = page("docs/dev/architecture.md")
PACKAGE = Path(npu_agent.__file__).parent
ROOMS = ("core/", "kubelet/", "outputs/")
"""Rooms whose modules a chain has to name; the others are probes on threads, tools and values."""
VALUES = {
    *("core/hardware", "core/counts", "core/kinds", "core/state", "core/vendor", "core/versions"),
    *("core/identity", "kubelet/rpc"),
}
"""Modules that a reader knows from "Read first", or need not open."""
WATCHERS = {
    *("core/trends", "core/comparison", "core/changes", "core/timeline", "core/cordon"),
    *("core/utilization", "core/pool", "core/support", "kubelet/cordons", "kubelet/ownership"),
    *("outputs/events", "outputs/web/history", "outputs/condition", "outputs/web/routes"),
    *("outputs/prometheus/own", "outputs/web/readers", "outputs/web/server"),
}
"""Modules that follow the same news for other readers, or a clock: page, log, Events, labels."""
NAMED = {"core/offer", "core/pool", "kubelet/cordons"}
"""Here the names say enough: a Device, a claim, and a wait for the cordons to be read."""
ON_DISK = {"kubelet/record", "kubelet/cdi"}
"""Written after a device is withheld, and after any change of who holds what."""


def chain(title: str) -> list[str]:
    """The modules of a row of the table, as paths below the package."""
    [row] = re.findall(
        rf"^\| {title} \| (.*) \|$", page("docs/dev/architecture.md").text, re.MULTILINE
    )
    names = re.findall(r"`([\w/]+)`", row)
    found = [name if (PACKAGE / f"{name}.py").exists() else f"outputs/{name}" for name in names]
    assert all((PACKAGE / f"{name}.py").exists() for name in found)
    return found


SERVING: ContextVar[bool] = ContextVar("SERVING", default=False)
"""Whether a task serves the call that is profiled; the tasks that it starts inherit that."""


@contextmanager
def profiled(handler: str = "") -> Iterator[set[str]]:
    """The modules of our package that the event loop's thread calls meanwhile.

    With the name of a handler: only those that it calls, in its task and in those that it starts.
    """
    modules: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(PACKAGE):
            return
        if handler and frame.f_code.co_qualname == handler:
            SERVING.set(True)
        if SERVING.get() or not handler:
            modules.add(str(file.relative_to(PACKAGE).with_suffix("")))

    sys.setprofile(note)
    try:
        yield modules
    finally:
        sys.setprofile(None)


def check(title: str, ran: set[str], others: set[str] | None, most: int) -> None:
    """Compares a row with what ran; `others` may run too, and None: anything."""
    named = chain(title)
    own = {name for name in named if name.startswith(ROOMS)}
    assert own <= ran, f"they do not run: {own - ran}"
    if others is not None:
        judged = {name for name in ran if name.startswith(ROOMS) and "/wire/" not in name}
        assert judged - own - others == set(), "name them in the table, or say here why not"
    assert len(named) <= most, "a reader opens no more"


QUIET: dict[str, Any] = {"labels": LabelsConfig(output="none"), "events": False, "node_name": None}


async def test_allocate_runs_through_the_modules_of_its_chain(node: Node) -> None:
    node.cards("warboy=2")
    async with node.agent(**QUIET) as agent:
        await node.listed(2)
        await first(agent.allocator.pod_resources.holdings, lambda now: now.asked_at)
        with profiled("DevicePlugin._allocate") as ran:
            await node.kubelet.allocate(NPU, 1)
    check("Allocate", ran, VALUES | NAMED, most=8)


async def test_a_card_that_fails_runs_through_the_modules_of_its_chain(node: Node) -> None:
    node.cards("warboy=2")
    async with node.agent(**QUIET):
        await node.listed(2)
        with profiled() as ran:
            node.fault("npu1", "dead")
            await node.told(lambda plugin: len(plugin.healthy()) == 1)
    # An answer of pod-resources may come meanwhile.
    meanwhile = {"kubelet/podresources", "kubelet/pods"}
    others = VALUES | WATCHERS | ON_DISK | meanwhile
    check("a card fails, and the kubelet knows", ran, others, most=10)


async def test_a_scrape_runs_through_the_modules_of_its_chain(node: Node) -> None:
    node.cards("warboy=2")
    async with node.agent(**QUIET) as agent, aiohttp.ClientSession() as client:
        await node.listed(2)
        address = await first(agent.web.server.listening, lambda at: at is not None)
        assert address
        with profiled() as ran:
            async with client.get(f"http://{address[0]}:{address[1]}/metrics") as answer:
                assert answer.status == 200
            await asyncio.sleep(0)
    # An agent that has just started has other work meanwhile.
    check("a scrape", ran, None, most=8)


async def test_prepare_runs_through_the_modules_of_its_chain(room: Room) -> None:
    room.node.cards("warboy=2")
    async with room.node.agent(allocation=DRA, **NOTHING_ELSE):
        await room.free(*NAMES)
        await room.registered()
        claim = room.claim("c", NAMES[0])
        with profiled("DraPlugin._node_prepare") as ran:
            await room.prepared(claim)
    check("NodePrepareResources", ran, VALUES | NAMED | {"kubelet/podresources"}, most=10)
