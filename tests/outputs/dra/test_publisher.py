"""Slices are published, kept, put back, and left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_agent.backoff import Backoff
from npu_agent.core.pool import PoolDevice
from npu_agent.core.state import SlicesState
from npu_agent.core.trends import TrendKind
from npu_agent.feed import Feed
from npu_agent.kube import Api, follow
from npu_agent.outputs.dra.publisher import SlicePublisher, SliceTiming
from npu_agent.people.simulator.apiserver import NODES
from tests.kube.apiserver import COUNTERS, FaultyApiServer
from tests.kube.helpers import Reply, drops, says, status
from tests.outputs.dra.api import DRIVER, NODE, api_server, cluster, pools
from tests.outputs.dra.cards import card, parts, pool_of, rngd
from tests.outputs.helpers import bare_pool
from tests.until import first, until

NAME = f"00000-{DRIVER}-{NODE}"
SECOND = f"00001-{DRIVER}-{NODE}"
BACK = 15.0
"""Seconds; guards against hanging. How soon slices are back is measured in tests/e2e."""


@dataclass
class World:
    server: FaultyApiServer
    api: Api
    devices: Feed[tuple[PoolDevice, ...] | None]
    publisher: SlicePublisher

    @property
    def state(self) -> SlicesState:
        return self.publisher.state.value

    async def in_place(self, deadline: float = BACK) -> SlicesState:
        """Waits until what is wanted is there."""

        def there() -> bool:
            wanted = [device.name for device in self.devices.value or ()]
            pools = [each["spec"]["pool"] for each in self.server.slices.values()]
            said = (self.state.published, self.state.devices, self.state.slices)
            return (
                list(self.server.devices()) == wanted
                and said == (True, len(wanted), len(pools))
                and {pool["generation"] for pool in pools} == {self.state.generation}
            )

        await until(there, "the slices to be in place", deadline=deadline)
        return self.state

    async def watching(self, times: int = 1) -> None:
        await until(lambda: self.server.calls.count("watch") >= times)

    async def quiet(self) -> None:
        """Lets everything run that has anything to do."""
        for _ in range(20):
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    directory: Path,
    devices: tuple[PoolDevice, ...] | None,
    server: FaultyApiServer | None = None,
    **timing: float,
) -> AsyncIterator[World]:
    async with cluster(directory, server) as (fresh, api):
        pool = bare_pool(devices)
        longest = timing.get("retry_longest", 60.0)
        times = SliceTiming(retry_longest=longest, watch=follow.WatchTiming(**timing))
        publisher = SlicePublisher(api, NODE, pool, times)
        task = asyncio.create_task(publisher.run())
        try:
            yield World(fresh, api, pool.offered, publisher)
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.wait([task])


@asynccontextmanager
async def watching(
    directory: Path, devices: tuple[PoolDevice, ...], **timing: float
) -> AsyncIterator[World]:
    """The slices are in place and watched."""
    async with running(directory, devices, None, **timing) as world:
        await world.in_place()
        await world.watching()
        yield world


def api_pauses(
    monkeypatch: pytest.MonkeyPatch, instead: Callable[[Backoff, float | None], float]
) -> None:
    """Replaces the pauses after a refusal; those between writes stay."""
    real = Backoff.next

    def next_(self: Backoff, retry_after: float | None = None) -> float:
        return (real if self.least else instead)(self, retry_after)

    monkeypatch.setattr(Backoff, "next", next_)


# What is published.


async def test_no_slice_is_written_while_no_device_is_known(tmp_path: Path) -> None:
    async with running(tmp_path, None) as world:
        await world.watching()
        await world.quiet()
        assert world.server.writes == []
        assert world.state == SlicesState()
        world.devices.publish(rngd(8))
        state = await world.in_place()
        assert (state.slices, state.devices, state.generation, state.writes) == (1, 8, 1, 1)
        assert world.server.slices[NAME]["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
        world.devices.publish(None)
        await world.quiet()
        assert len(world.server.devices()) == 8


async def test_no_slice_is_written_before_the_present_ones_are_listed(tmp_path: Path) -> None:
    async with running(tmp_path, None) as world:
        world.server.instead["list"] = status(503, "not now")
        world.devices.publish(rngd(2))
        await until(lambda: world.server.calls.count("list") >= 2)
        await world.quiet()
        assert world.server.writes == []
        del world.server.instead["list"]
        await world.in_place()


async def test_no_slice_is_written_without_a_change(tmp_path: Path) -> None:
    """Nor by the next agent, which goes on with the slices in a rolling update."""
    async with running(tmp_path, rngd(70, unhealthy=(3,))) as world:
        await world.in_place()
        writes = list(world.server.writes)
        world.devices.publish(rngd(70, unhealthy=(3,)))
        world.publisher.ask_now()
        world.publisher.ask_now()
        await until(lambda: world.server.calls.count("list") >= 2)
        await world.quiet()
        assert world.server.writes == writes
        assert len(writes) == world.state.writes == 2
    async with running(tmp_path, rngd(70, unhealthy=(3,)), world.server) as following:
        await following.in_place()
        await following.quiet()
        assert world.server.writes == writes
        assert following.state.generation == 2


async def test_an_unhealthy_card_is_one_write_and_its_taint_keeps_its_time(tmp_path: Path) -> None:
    async with running(tmp_path, rngd(8)) as world:
        await world.in_place()
        world.devices.publish(rngd(8, unhealthy=(2,)))
        await until(world.server.taints)
        ((name, (taint,)),) = world.server.taints().items()
        assert name == rngd(8)[2].name
        world.devices.publish(rngd(8, unhealthy=(2, 5)))
        await until(lambda: len(world.server.taints()) == 2)
        assert world.server.taints()[name] == [taint]
        world.devices.publish(rngd(8))
        await until(lambda: not world.server.taints())
        assert world.server.writes == [f"apply {NAME}"] * 4
        assert world.state.generation == 1


async def test_more_cards_than_one_slice_holds_and_fewer_again(tmp_path: Path) -> None:
    async with running(tmp_path, rngd(64)) as world:
        await world.in_place()
        world.devices.publish(rngd(65))
        state = await world.in_place()
        assert (state.slices, state.generation) == (2, 2)
        world.devices.publish(rngd(3))
        state = await world.in_place()
        assert (state.slices, state.generation) == (1, 3)
        applied, created = f"apply {NAME}", f"apply {SECOND}"
        assert world.server.writes == [applied, applied, created, f"delete {SECOND}", applied]
        # (there are, there should be): the pool is incomplete between two calls only.
        assert pools(world.server) == [(1, 1), (1, 2), (2, 2), (1, 2), (1, 1)]


# What others do.


async def test_slices_of_another_pool_are_left_alone_and_named(tmp_path: Path) -> None:
    """Our policy lets the agent delete none of them: it would try for ever, and publish nothing."""
    server = api_server()
    server.slices["theirs"] = slice_of("theirs", 1)
    async with running(tmp_path, rngd(2), server) as world:
        await until(lambda: world.state.foreign == "theirs")
        await until(lambda: world.state.published)
        await world.watching()
        assert world.server.writes == [f"apply {NAME}"]

        world.server.put("theirs", **slice_of("theirs", 2)["spec"])
        world.server.put("more", **slice_of("more", 1)["spec"])
        await until(lambda: world.state.foreign == "more, theirs")
        for name in ("more", "theirs"):
            world.server.delete(name)
        await until(lambda: not world.state.foreign)
        assert world.server.writes == [f"apply {NAME}"]


def slice_of(name: str, generation: int) -> dict[str, Any]:
    pool = {"name": "theirs", "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": []}
    metadata = {"name": name, "resourceVersion": "1"}
    return {"kind": "ResourceSlice", "metadata": metadata, "spec": spec}


async def test_slices_that_are_deleted_are_back(tmp_path: Path) -> None:
    async with watching(tmp_path, rngd(70, unhealthy=(1,))) as world:
        for name in (NAME, SECOND):
            world.server.delete(name)
            await world.in_place()
        world.server.delete()  # as a kubelet does that starts
        state = await world.in_place()
        assert world.server.slices.keys() == {NAME, SECOND}
        # The scheduler may know the generations up to the last one.
        assert state.generation == 3


async def test_where_each_watch_ends_immediately_the_slices_are_listed(tmp_path: Path) -> None:
    async with running(tmp_path, rngd(2), retry_longest=0.01) as world:
        world.server.instead["watch"] = says("")
        await world.in_place()
        await world.watching(3)
        world.server.delete()
        await world.in_place()


async def test_a_silent_watch_is_seen_through_when_asked(tmp_path: Path) -> None:
    async with watching(tmp_path, rngd(2)) as world:
        world.server.slices.clear()  # and no event says so
        await world.quiet()
        assert not world.server.slices
        world.publisher.ask_now()  # the kubelet has asked for our name again: it was restarted
        await world.in_place()


async def test_watches_follow_each_other_without_a_list(tmp_path: Path) -> None:
    """All that an idle agent asks about slices: one watch of 5 to 10 minutes after the other."""

    async def bookmark(request: web.Request) -> web.StreamResponse:
        """Something else has happened; then the time of the watch is over."""
        version = str(int(request.query["resourceVersion"]) + 1)
        object_ = {"kind": "ResourceSlice", "metadata": {"resourceVersion": version}}
        event = {"type": "BOOKMARK", "object": object_}
        return await says(f"{json.dumps(event)}\n")(request)

    async with running(tmp_path, rngd(2), steady=0.0, retry_longest=0.01) as world:
        await world.in_place()
        await until(lambda: world.server.open)
        calls = len(world.server.calls)
        world.server.instead["watch"] = bookmark
        world.server.cut()
        await world.watching(12)
        assert set(world.server.calls[calls:]) == {"watch"}
        watches = world.server.watches[1:12]
        versions = [int(query["resourceVersion"]) for query in watches]
        assert versions == list(range(versions[0], versions[0] + 11))
        asked = {int(query["timeoutSeconds"]) for query in watches}
        assert len(asked) > 5
        assert asked <= set(range(300, 601))


@pytest.mark.parametrize(
    ("reply", "doing"),
    [
        (status(503, "not now"), "watch"),
        (drops, "list"),  # an outage
        (status(403, "no"), "list"),
    ],
)
async def test_a_watch_goes_on_where_it_was_unless_it_is_refused(
    tmp_path: Path, reply: Reply, doing: str
) -> None:
    async with watching(tmp_path, rngd(2), retry_longest=0.01) as world:
        calls = len(world.server.calls)
        world.server.instead["watch"] = reply
        world.server.cut()
        await until(lambda: len(world.server.calls) >= calls + 4)
        asked = world.server.calls[calls : calls + 4]
        assert asked == ["watch"] * 4 if doing == "watch" else ["watch", "list", "watch", "list"]
        assert world.state.trouble
        world.server.instead.clear()
        world.server.delete()
        await world.in_place()
        await first(world.publisher.state, lambda state: state.trouble is None)


async def test_a_slice_that_is_deleted_while_its_write_is_under_way_is_back(
    tmp_path: Path,
) -> None:
    async with watching(tmp_path, rngd(70)) as world:

        async def deleted(request: web.Request) -> web.StreamResponse:
            world.server.instead.clear()
            _, answer = world.server.act("apply", request.path, await request.json())
            world.server.delete(NAME)
            await until(lambda: world.publisher._stale)  # the event is known
            return web.json_response(answer)  # of before the event that was there first

        world.server.instead["apply"] = deleted
        world.devices.publish(rngd(70, unhealthy=(1,)))
        await until(lambda: not world.server.instead)
        await world.in_place()
        assert len(world.server.taints()) == 1


async def test_a_slice_that_is_deleted_while_they_are_listed_is_back(tmp_path: Path) -> None:
    async with watching(tmp_path, rngd(70)) as world:

        async def before(request: web.Request) -> web.StreamResponse:
            world.server.instead.clear()
            meta = {"resourceVersion": str(world.server.version.value)}
            items = list(world.server.slices.values())
            world.server.delete(NAME)
            await until(lambda: world.publisher._stale)  # the event is known
            return await says({"kind": "ResourceSliceList", "metadata": meta, "items": items})(
                request
            )

        world.server.instead["list"] = before
        world.publisher.ask_now()
        await until(lambda: not world.server.instead)
        await world.in_place()


async def test_a_restarted_kubelet_waits_for_no_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watching(tmp_path, rngd(2)) as world:
        api_pauses(monkeypatch, lambda *_: 3600.0)
        world.server.trouble = drops
        world.server.cut()
        world.devices.publish(rngd(3))
        await until(lambda: world.publisher._restarted and not world.state.published)
        await world.quiet()
        world.server.trouble = None
        world.publisher.ask_now()
        await world.in_place()
        await world.watching(2)
        world.server.delete()  # that kubelet does so in its own time
        await world.in_place()


async def test_pauses_grow_until_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def noted(self: Backoff, retry_after: float | None = None) -> float:
        assert retry_after is None
        tries.append(self.tries)
        self.tries += 1
        return 0.0

    async with watching(tmp_path, rngd(2)) as world:
        api_pauses(monkeypatch, noted)
        for count in (3, 4):
            world.server.instead["apply"] = status(503, "not now")
            world.devices.publish(rngd(count))
            await until(lambda: len(tries) >= 3)
            world.server.instead.clear()
            await world.in_place()
            assert tries[:3] == [0, 1, 2]
            tries.clear()
        # So it is with watches that end too soon, or cannot be opened, and one that lasts.
        world.server.instead["watch"] = says("")
        world.server.cut()
        await until(lambda: len(tries) >= 4)
        world.server.instead["watch"] = status(503, "not now")
        tried = len(tries)
        await until(lambda: len(tries) >= tried + 4)
        world.server.instead.clear()
        watches = world.server.calls.count("watch")
        await world.watching(watches + 1)
        assert tries == list(range(len(tries)))


async def test_a_node_that_is_deleted_and_created_again_owns_them_again(tmp_path: Path) -> None:
    async with watching(tmp_path, rngd(2)) as world:
        node = world.server.objects[NODES].pop(NODE)
        world.server.delete()
        await until(lambda: world.server.calls.count(f"get {NODE}") >= 3)
        assert not world.state.published
        assert world.state.trouble
        node["metadata"]["uid"] = "uid-2"
        world.server.objects[NODES][NODE] = node
        state = await world.in_place()
        assert world.server.slices[NAME]["metadata"]["ownerReferences"][0]["uid"] == "uid-2"
        assert state.trouble is None


async def test_two_that_write_the_same_slices_do_not_do_so_all_the_time(tmp_path: Path) -> None:
    async with watching(tmp_path, rngd(2)) as world:
        writes = len(world.server.writes)
        loop = asyncio.get_running_loop()
        end = loop.time() + 1.0
        while loop.time() < end:
            if world.server.devices():
                world.server.put(NAME, devices=[])
            await asyncio.sleep(0.005)
        assert 1 <= len(world.server.writes) - writes <= 6


# An API server that is away, or refuses.


async def test_a_write_whose_answer_is_lost_may_have_taken_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wanted now was there before it: only a list proves that it still is."""
    api_pauses(monkeypatch, lambda *_: 0.001)
    async with watching(tmp_path, ()) as world:
        server = world.server

        async def late(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.02)  # a list is under way while the write is tried again
            return await drops(request)

        async def unanswered(request: web.Request) -> web.StreamResponse:
            server.cut()
            server.act("apply", request.path, await request.json())
            server.trouble = late
            return await drops(request)

        server.instead["apply"] = unanswered
        world.devices.publish(rngd(1))
        await until(lambda: server.trouble)
        assert server.devices()
        world.devices.publish(())
        tries = len(server.calls)
        await until(lambda: len(server.calls) >= tries + 5)
        assert world.publisher.confirmed.value is None
        server.instead.clear()
        server.trouble = None
        await world.in_place()
        await until(lambda: world.publisher.confirmed.value == ())


async def test_a_refusal_is_trouble_and_retried_with_pauses(tmp_path: Path) -> None:
    async with running(tmp_path, rngd(2)) as world:
        world.server.instead["apply"] = status(403, 'User "x" cannot patch')
        state = await first(world.publisher.state, lambda state: state.trouble)
        assert state.trouble
        assert "apply ResourceSlice" in state.trouble
        assert "no right to patch resourceslices" in state.trouble
        assert not state.published
        world.server.instead.clear()
        state = await world.in_place()
        assert (state.trouble, state.writes) == (None, 1)


@pytest.mark.parametrize("call", ["watch", "apply"])
async def test_the_api_servers_wish_to_wait_is_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    asked_for: list[float | None] = []

    def noted(_: Backoff, retry_after: float | None = None) -> float:
        asked_for.append(retry_after)
        return 0.01

    api_pauses(monkeypatch, noted)
    async with running(tmp_path, None) as world:
        world.server.instead[call] = status(429, "busy", Retry_After="7")
        world.devices.publish(rngd(2))
        await until(lambda: asked_for)
        assert asked_for[0] == 7.0
        world.server.instead.clear()
        await world.in_place()


# Fields that the API server drops.


def one_is_hot() -> tuple[PoolDevice, ...]:
    hot = card("rngd", 1)
    return pool_of(card("rngd", 0), hot, degraded={hot.id: {TrendKind.HOT}})


async def test_without_taints_an_unhealthy_card_is_not_offered_and_a_hot_one_is(
    tmp_path: Path,
) -> None:
    whole, hot, unhealthy = *one_is_hot(), rngd(3, unhealthy=(2,))[2]
    async with running(tmp_path, (whole, hot, unhealthy)) as world:
        world.server.dropped = {"taints"}
        await until(lambda: list(world.server.devices()) == [whole.name, hot.name])
        state = await first(world.publisher.state, lambda state: state.dropped)
        assert state.dropped == ("devices.taints",)
        await world.quiet()
        writes = list(world.server.writes)
        world.devices.publish(rngd(3, unhealthy=(1, 2)))
        await until(lambda: list(world.server.devices()) == [whole.name])
        world.devices.publish(rngd(3))
        await world.in_place()
        assert len(world.server.writes) == len(writes) + 2


def older(server: FaultyApiServer, unknown: str) -> Reply:
    """An API server that refuses slices with this in them."""

    async def reply(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if unknown in json.dumps(body):
            return await status(422, f"Unsupported value: {unknown}")(request)
        code, found = server.act("apply", request.path, body)
        return web.json_response(found, status=code)

    return reply


async def test_an_api_server_that_does_not_know_the_effect_gets_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running(tmp_path, rngd(2)) as world:
        await world.in_place()
        world.server.instead["apply"] = older(world.server, '"None"')
        unhealthy = replace(
            one_is_hot()[1], taints=(*one_is_hot()[1].taints, *rngd(2, (1,))[1].taints)
        )
        world.devices.publish((rngd(2)[0], unhealthy))
        state = await first(world.publisher.state, lambda state: state.dropped and state.published)
        assert state.dropped == ("devices.taints.effect None",)
        (taints,) = world.server.taints().values()
        assert [one["effect"] for one in taints] == ["NoSchedule"]
        assert caplog.text.count("ResourceSlices written") == 2  # what was refused is not


async def test_an_updated_api_server_may_keep_fields_that_were_dropped(tmp_path: Path) -> None:
    async with running(tmp_path, rngd(3, unhealthy=(1,))) as world:
        world.server.dropped = {"taints"}
        await first(world.publisher.state, lambda state: state.dropped and state.published)
        await world.watching()
        world.server.trouble = drops
        world.server.cut()
        await first(world.publisher.state, lambda state: state.trouble)
        world.server.dropped = set()
        world.server.trouble = None
        state = await world.in_place(deadline=6)
        assert state.dropped == ()
        assert len(world.server.taints()) == 1


# Cards that are cut on demand.


async def test_counters_are_written_first(tmp_path: Path) -> None:
    async with running(tmp_path, parts(2)) as world:
        state = await world.in_place()
        assert (state.slices, state.devices, state.writes) == (2, 30, 2)
        assert world.server.writes == [f"apply {NAME}", f"apply {SECOND}"]
        assert pools(world.server) == [(1, 2), (2, 2)]


@pytest.mark.parametrize("how", ["drops", "refuses"])
async def test_where_counters_are_not_kept_cards_are_offered_whole(
    tmp_path: Path, how: str
) -> None:
    async with running(tmp_path, None) as world:
        if how == "drops":
            world.server.dropped = set(COUNTERS)
        else:
            world.server.instead["apply"] = older(world.server, "sharedCounters")
        world.devices.publish(parts(3))
        state = await first(world.publisher.state, lambda state: state.published)
        assert state.uncounted
        assert list(world.server.devices()) == [one.name for one in rngd(3)]
        # Never was there a complete pool with devices that overlap.
        assert world.server.writes == [f"apply {NAME}"] * 2
        assert not any("consumesCounters" in one for one in world.server.devices().values())
        # What follows from it for the parts that are held, the driver computes.
        world.devices.publish(rngd(3))
        await world.quiet()
        assert world.server.writes == [f"apply {NAME}"] * 2


async def test_whether_the_pool_is_complete(tmp_path: Path) -> None:
    async with running(tmp_path, parts(2)) as world:
        await world.in_place()
        assert not world.state.incomplete
        await world.watching()
        world.server.instead["apply"] = status(403, "no")
        world.server.delete(NAME)
        await first(world.publisher.state, lambda state: state.incomplete)
        world.server.instead.clear()
        world.publisher.ask_now()
        await first(world.publisher.state, lambda state: not state.incomplete)
