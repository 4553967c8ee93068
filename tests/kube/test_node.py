"""The watch of the own Node between the stand-in API server and a reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from npu_agent.feed import Feed
from npu_agent.kube.follow import WatchTiming
from npu_agent.kube.node import NodeWatch, OwnNode
from npu_agent.people.simulator.apiserver import NODES
from tests.kube.apiserver import FaultyApiServer
from tests.kube.helpers import hangs, says, status
from tests.outputs.dra.api import NODE, cluster
from tests.until import first, until

KEY = "npu-agent/cordoned"


@dataclass
class World:
    server: FaultyApiServer
    watch: NodeWatch
    wanted: Feed[bool]

    async def sees(self, value: str | None) -> OwnNode:
        found = await first(
            self.watch.state, lambda now: now is not None and now.annotations.get(KEY) == value
        )
        assert found
        return found

    async def watching(self, times: int = 1) -> None:
        await until(lambda: self.server.calls.count("watch nodes") >= times)


@asynccontextmanager
async def world(tmp_path: Path, name: str | None = NODE) -> AsyncIterator[World]:
    async with cluster(tmp_path) as (server, api):
        wanted = Feed(True)
        watch = NodeWatch(api, name, wanted, WatchTiming(retry_longest=0.05))
        task = asyncio.create_task(watch.run())
        try:
            yield World(server, watch, wanted)
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_a_watch_has_the_node_and_its_changes(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        assert (await here.sees(None)).labels == {"kubernetes.io/hostname": NODE}
        await here.watching()
        here.server.annotate(KEY, "{}")
        await here.sees("{}")
        here.server.act(
            "patch",
            f"{NODES}/{NODE}",
            {
                "spec": {"unschedulable": True, "taints": [{"key": "a", "effect": "NoSchedule"}]},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            },
        )
        found = await first(here.watch.state, lambda now: now is not None and now.unschedulable)
        assert found
        assert found.conditions == {"Ready": "True"}
        assert here.server.calls == ["watch nodes"]


async def test_a_change_that_is_not_followed_wakes_no_reader(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.watching()
        changed = here.watch.state.changed
        here.server.act("patch", f"{NODES}/{NODE}", {"status": {"allocatable": {"cpu": "2"}}})
        here.server.annotate("another", "1")
        await until(changed.is_set)
        assert here.watch.state.value
        assert here.watch.state.value.annotations == {"another": "1"}


async def test_a_broken_watch_goes_on_and_an_old_one_begins_again(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.watching()
        here.server.cut()
        here.server.annotate(KEY, "1")
        await here.sees("1")
        assert here.server.calls == ["watch nodes"] * 2
        here.server.cut()
        here.server.forget_events()
        here.server.annotate(KEY, "2")
        here.server.forget_events()
        await here.sees("2")
        # The last one from what there is: of that in between there is no event any more.
        assert here.server.calls == ["watch nodes"] * 4
        assert here.watch.error is None


async def test_the_last_value_stays_while_the_server_is_away_or_the_node_gone(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        await here.watching()
        here.server.annotate(KEY, "1")
        await here.sees("1")
        here.server.instead["watch nodes"] = status(403, "cannot watch")
        here.server.cut()
        await until(lambda: here.watch.error)
        assert "has no right to" in (here.watch.error or "")
        here.server.act("delete", f"{NODES}/{NODE}", {})
        here.server.instead.clear()
        await until(lambda: here.watch.error is None)
        await here.sees("1")


async def test_an_answer_that_is_no_node(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.watching()
        event = '{"type": "MODIFIED", "object": {"metadata": 5}}\n'
        here.server.instead["watch nodes"] = says(event)
        here.server.cut()
        await until(lambda: "cannot be used" in (here.watch.error or ""))
        here.server.instead.clear()
        await until(lambda: here.watch.error is None)


async def test_the_node_is_not_read_unless_wanted(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.watching()
        here.wanted.publish(False)
        await until(lambda: not here.server.open)
        calls = list(here.server.calls)
        here.server.instead["watch nodes"] = hangs
        here.wanted.publish(True)
        await until(lambda: len(here.server.calls) > len(calls))
    async with world(tmp_path, None) as here:
        await asyncio.sleep(0)
        assert not here.server.calls


@pytest.mark.parametrize(
    ("conditions", "unschedulable", "maintenance"),
    [
        ({"Ready": "True", "Drained": "False"}, False, ""),
        ({"DrainInProgress": "True"}, False, "DrainInProgress"),
        ({"MaintenancePlanned": "True"}, True, "MaintenancePlanned, the Node is cordoned"),
    ],
)
def test_work_on_the_node_is_named(
    conditions: dict[str, str], unschedulable: bool, maintenance: str
) -> None:
    own = OwnNode(labels={}, annotations={}, unschedulable=unschedulable, conditions=conditions)
    assert own.maintenance == maintenance
