"""ResourceSlices on a real API server: what it takes, and what its garbage collector deletes.

A publisher runs in the test itself, for a Node that no kubelet serves: it reaches the cluster's API
server through a relay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from npu_agent.cli.main import main
from npu_agent.core.pool import PoolDevice
from npu_agent.core.state import SlicesState
from npu_agent.feed import Feed
from npu_agent.kube import Api, dra
from npu_agent.outputs.dra.publisher import SlicePublisher
from npu_agent.outputs.dra.slices import differs, dropped, keeping_times, slices
from npu_agent.outputs.dra.slices import name as slice_name
from npu_agent.outputs.events import Event, _Queued, _request
from npu_agent.ticks import stamp
from tests.cluster import Cluster, network, settings
from tests.e2e.fakes import PAPER, paper
from tests.e2e.manifests import DRIVER, thing
from tests.e2e.node import Node
from tests.kube.helpers import client, kubeconfig
from tests.outputs.dra.cards import card, parts, pool_of, rngd
from tests.outputs.helpers import bare_pool
from tests.until import first, until

pytestmark = pytest.mark.one_kubelet
BACK = 3.0
"""Seconds within which slices are back, whatever happened to them."""


@pytest.fixture(autouse=True)
def paper_node(node: Node) -> Iterator[None]:
    """The Node of the slices; each test starts without any."""
    with paper(node):
        yield


@asynccontextmanager
async def relay(cluster: Cluster) -> AsyncIterator[int]:
    """A port of this machine that leads to the API server."""
    target = (urlsplit(settings.SERVER).hostname or "", settings.API_PORT)
    tasks: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while chunk := await reader.read(65536):
                    writer.write(chunk)
                    await writer.drain()
        finally:
            writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = await asyncio.to_thread(network.connect, cluster.pid, target, 5.0)
        there = await asyncio.open_connection(sock=sock)
        async with asyncio.TaskGroup() as both:
            both.create_task(pump(reader, there[1]))
            both.create_task(pump(there[0], writer))

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(lead(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class World:
    """A publisher and what it has published."""

    node: Node
    api: Api
    devices: Feed[tuple[PoolDevice, ...] | None]
    publisher: SlicePublisher

    @property
    def state(self) -> SlicesState:
        return self.publisher.state.value

    async def live(self) -> list[dict[str, Any]]:
        """The slices there are, in the order of their names."""
        found = await dra.list_slices(self.api, PAPER, DRIVER)
        return [dict(found.slices[name]) for name in sorted(found.slices)]

    async def taints(self) -> dict[str, dict[str, Any]]:
        """By the device's name."""
        return {
            device["name"]: device["taints"][0]
            for each in await self.live()
            for device in each["spec"].get("devices", ())
            if device.get("taints")
        }

    async def put(self, devices: tuple[PoolDevice, ...]) -> None:
        """Publishes devices, and waits until they are there."""
        self.devices.publish(devices)
        await first(
            self.publisher.state,
            lambda state: state.published and state.devices == len(devices),
            deadline=60,
        )

    def wanted(self) -> tuple[dict[str, Any], ...]:
        """The slices of the devices that there are."""
        uid = self.node.get("node", PAPER)["metadata"]["uid"]
        devices, generation = self.devices.value or (), self.state.generation
        return slices(devices, driver=DRIVER, node=PAPER, uid=uid, generation=generation)


@asynccontextmanager
async def publishing(node: Node, directory: Path) -> AsyncIterator[World]:
    async with relay(node.cluster) as port:
        path = kubeconfig(
            directory,
            f"https://127.0.0.1:{port}",
            user={"token": "admin-token"},
            cluster={"certificate-authority": str(node.cluster.kubeconfig.with_name("ca.crt"))},
        )
        api = client(path)
        pool = bare_pool()
        publisher = SlicePublisher(api, PAPER, pool)
        task = asyncio.create_task(publisher.run())
        try:
            yield World(node, api, pool.offered, publisher)
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])
            await api.close()


@pytest.mark.parametrize(
    "devices",
    [
        pool_of(card("warboy", 0), card("rngd", 1)),
        pool_of(),
        rngd(64, unhealthy=tuple(range(64))),
        rngd(70),
        parts(20),
    ],
    ids=["mixed", "none", "all-unhealthy", "many", "cut-on-demand"],
)
async def test_a_slice_is_taken_as_it_was_sent_and_not_written_again(
    node: Node, tmp_path: Path, devices: tuple[PoolDevice, ...]
) -> None:
    async with publishing(node, tmp_path) as world:
        await world.put(devices)
        live, wanted = await world.live(), world.wanted()
        assert len(live) == len(wanted) == world.state.slices
        for there, sent in zip(live, wanted, strict=True):
            assert not differs(there, sent)
            assert dropped(sent, there) == ()
            # What the agent sends a second time changes nothing, and so writes nothing.
            names = {there["metadata"]["name"]: there}
            again = await dra.apply_slice(world.api, keeping_times(sent, names))
            assert again["metadata"]["resourceVersion"] == there["metadata"]["resourceVersion"]
    # And one that starts finds it in place.
    async with publishing(node, tmp_path) as world:
        await world.put(devices)
        assert world.state.writes == 0


def test_a_template_of_slices_is_taken_as_it_is_printed(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dra", "slices", "--template", "rngd=9,warboy=1", "--dra-partitions=true"]) == 0
    file = tmp_path / "slices.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    node.kubectl("apply", "--server-side", "--filename", str(file))
    try:
        for sent in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            live = node.get("resourceslice", sent["metadata"]["name"])
            assert not differs(live, sent)
            assert dropped(sent, live) == ()
    finally:
        node.kubectl("delete", "--filename", str(file))


async def test_a_taint_keeps_its_time(node: Node, tmp_path: Path) -> None:
    """The API server begins a taint again with each write that leaves out its time."""
    async with publishing(node, tmp_path) as world:
        await world.put(rngd(3, unhealthy=(0,)))
        ((name, before),) = (await world.taints()).items()
        # The API server's times have whole seconds: another one has begun.
        await asyncio.sleep(1.1)
        world.devices.publish(rngd(3, unhealthy=(0, 2)))

        async def two() -> bool:
            return len(await world.taints()) == 2

        await until(two, interval=0.05)
        after = await world.taints()
        assert after.pop(name) == before
        ((_, other),) = after.items()
        assert other["timeAdded"] > before["timeAdded"]
        await asyncio.sleep(1.1)
        await dra.apply_slice(world.api, world.wanted()[0])
        assert (await world.taints())[name]["timeAdded"] > other["timeAdded"]


async def test_slices_of_a_node_that_was_created_again_are_its_own(
    node: Node, tmp_path: Path
) -> None:
    async with publishing(node, tmp_path) as world:
        await world.put(rngd(8))
        before = node.get("node", PAPER)["metadata"]["uid"]
        await asyncio.to_thread(node.kubectl, "delete", "node", PAPER)
        # The garbage collector deletes them with the Node, and they do not come back without it.

        async def there(count: int) -> bool:
            return len(await world.live()) == count

        await until(lambda: there(0), "the slices to be gone", interval=0.05)
        await first(world.publisher.state, lambda state: state.trouble)
        await asyncio.to_thread(node.apply, thing("Node", PAPER, namespace=""))
        await until(lambda: there(1), deadline=BACK, interval=0.05)
        (owner,) = (await world.live())[0]["metadata"]["ownerReferences"]
        uid = node.get("node", PAPER)["metadata"]["uid"]
        assert owner["uid"] == uid != before
        (after,) = await world.live()
        await asyncio.sleep(2)
        assert (await world.live())[0]["metadata"]["uid"] == after["metadata"]["uid"]


def of_another(name: str) -> dict[str, Any]:
    """A large slice for our driver and this Node, in a pool that is not the agent's."""
    attributes = {f"attribute_{n}": {"string": "x" * 60} for n in range(32)}
    devices = [{"name": f"npu{n}", "attributes": attributes} for n in range(128)]
    pool = {"name": "theirs", "generation": 1, "resourceSliceCount": 17}
    spec = {"driver": DRIVER, "nodeName": PAPER, "pool": pool, "devices": devices}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": spec,
    }


async def test_slices_of_others_for_this_node_are_named_and_hinder_nothing(
    node: Node, tmp_path: Path
) -> None:
    names = [f"theirs-{n:02}" for n in range(17)]
    async with publishing(node, tmp_path) as world:
        try:
            for name in names:
                await dra.apply_slice(world.api, of_another(name))
            await world.put(rngd(8))
            world.publisher.ask_now()
            await until(lambda: world.state.foreign.endswith("and 13 more"))
            assert [each["metadata"]["name"] for each in await world.live()] == [
                slice_name(0, DRIVER, PAPER)
            ]
            assert world.state.writes == 1
        finally:
            for name in names:
                await dra.delete_slice(world.api, name)
        await until(lambda: not world.state.foreign)


@pytest.mark.parametrize("length", [64, 229, 230, 240, 253])
async def test_names_that_are_made_of_the_longest_nodes_are_taken(
    node: Node, tmp_path: Path, length: int
) -> None:
    long = f"{'.'.join('a-' * 30 + letter for letter in 'abcde')[: length - 1]}e"
    async with publishing(node, tmp_path) as world:
        (slice_,) = slices(rngd(1), driver=DRIVER, node=long, uid="7b0c", generation=1)
        taken = await dra.apply_slice(world.api, slice_)
        await dra.delete_slice(world.api, taken["metadata"]["name"])
        event = Event(reason="NPUTest", message="a long name", warning=False)
        await world.api.ask(_request(event, _Queued(first=stamp(), last=stamp(), count=1), long))
