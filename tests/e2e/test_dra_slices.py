"""ResourceSlices on a real API server, beside a real kubelet, scheduler and garbage collector.

A publisher runs in the test itself, without an agent around it: it reaches the cluster's API server
through a relay.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from npu_agent.core.claim import Claim
from npu_agent.core.hardware import CardState, HealthState
from npu_agent.core.pool import PoolDevice
from npu_agent.core.state import TAINTS, SlicesState
from npu_agent.feed import Feed
from npu_agent.kube import Api, ApiError, resourceclaims, resourceslices
from npu_agent.outputs.dra.publisher import SlicePublisher
from npu_agent.outputs.dra.slices import differs, dropped, keeping_times, slices
from tests.cluster import Cluster, network, settings
from tests.kube.helpers import kubeconfig
from tests.outputs.dra.cards import card, pool_of
from tests.until import first, until

DRIVER = "npu.furiosa.ai"
ALL = "/apis/resource.k8s.io/v1/resourceslices"
BACK = 3.0
"""Seconds within which slices are back, whatever happened to them."""
PAUSED = 70.0
"""Seconds within which an API server that was away is asked again."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of this module's own: it has no agent, and its API server is restarted."""
    workdir = Path(tempfile.mkdtemp(prefix="npu-e2e-", dir="/tmp"))
    with Cluster.start(workdir) as running:
        yield running


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> None:
    """Each test starts without slices."""
    cluster.kubectl("delete", "resourceslices", "--all")


@asynccontextmanager
async def relay(cluster: Cluster) -> AsyncIterator[int]:
    """A port of this machine that leads to the API server."""
    url = urlsplit(settings.SERVER)
    target = (url.hostname or "", settings.API_PORT)
    pid = cluster._sandbox.init.pid
    tasks: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            sock = await asyncio.to_thread(network.connect, pid, target, 5.0)
            there = await asyncio.open_connection(sock=sock)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(pump(reader, there[1]))
                    both.create_task(pump(there[0], writer))
            finally:
                there[1].close()
        except OSError:
            pass  # nobody answers there
        finally:
            writer.close()

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
    cluster: Cluster
    api: Api
    devices: Feed[tuple[PoolDevice, ...] | None]
    publisher: SlicePublisher

    @property
    def state(self) -> SlicesState:
        return self.publisher.state.value

    async def live(self) -> list[dict[str, Any]]:
        """The slices there are, in the order of their names."""
        found = await resourceslices.read(self.api, self.cluster.node_name, DRIVER)
        return [dict(found.slices[name]) for name in sorted(found.slices)]

    async def taints(self) -> dict[str, dict[str, Any]]:
        """By the device's name."""
        return {
            device["name"]: device["taints"][0]
            for each in await self.live()
            for device in each["spec"].get("devices", ())
            if device.get("taints")
        }

    async def uids(self) -> list[str]:
        return [each["metadata"]["uid"] for each in await self.live()]

    async def put(self, *cards: CardState) -> float:
        """Publishes what these cards are; returns the seconds until it is there."""
        devices = pool_of(*cards)
        started = time.monotonic()
        self.devices.publish(devices)
        async with asyncio.timeout(BACK):
            await first(
                self.publisher.state,
                lambda state: state.published and state.devices == len(devices),
            )
        return time.monotonic() - started

    def wanted(self) -> tuple[dict[str, Any], ...]:
        node = self.cluster.get("node", self.cluster.node_name)
        return slices(
            self.devices.value or (),
            driver=DRIVER,
            node=self.cluster.node_name,
            uid=node["metadata"]["uid"],
            generation=self.state.generation,
        )


@asynccontextmanager
async def client(cluster: Cluster, directory: Path) -> AsyncIterator[Api]:
    async with relay(cluster) as port:
        path = kubeconfig(
            directory,
            f"https://127.0.0.1:{port}",
            user={"token": "admin-token"},
            cluster={"certificate-authority": str(cluster.workdir / "config" / "ca.crt")},
        )
        api = Api(kubeconfig=path)
        try:
            yield api
        finally:
            await api.close()


@asynccontextmanager
async def publishing(cluster: Cluster, directory: Path) -> AsyncIterator[World]:
    async with client(cluster, directory) as api:
        feed: Feed[tuple[PoolDevice, ...] | None] = Feed(None)
        publisher = SlicePublisher(api, cluster.node_name, DRIVER, feed)
        task = asyncio.create_task(publisher.run())
        try:
            # Connected, so that what is measured is the publishing.
            await first(publisher.live, lambda live: live is not None)
            yield World(cluster, api, feed, publisher)
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])


def rngd(count: int, sick: tuple[int, ...] = ()) -> tuple[CardState, ...]:
    return tuple(
        card("rngd", at, health=HealthState.UNHEALTHY if at in sick else HealthState.HEALTHY)
        for at in range(count)
    )


# What the API server takes, and makes of it.


@pytest.mark.parametrize(
    "cards",
    [
        (card("warboy", 0),),
        rngd(8),
        (card("warboy", 0), *rngd(2)),
        rngd(3, sick=(1,)),
        (),
        rngd(64, sick=tuple(range(64))),
        rngd(70),
    ],
    ids=["warboy", "rngd", "mixed", "sick", "none", "all-sick", "many"],
)
async def test_it_is_taken_as_it_was_sent_and_not_written_again(
    cluster: Cluster, tmp_path: Path, cards: tuple[CardState, ...]
) -> None:
    async with publishing(cluster, tmp_path) as world:
        seconds = await world.put(*cards)
        print(f"{len(cards)} cards are published in {seconds * 1000:.0f} ms")
        live, wanted = await world.live(), world.wanted()
        assert len(live) == len(wanted) == world.state.slices
        for there, sent in zip(live, wanted, strict=True):
            assert not differs(there, sent)
            assert dropped(sent, there) == ()
            # What the agent sends a second time changes nothing, and so writes nothing.
            names = {there["metadata"]["name"]: there}
            again = await resourceslices.apply(world.api, keeping_times(sent, names))
            assert again["metadata"]["resourceVersion"] == there["metadata"]["resourceVersion"]
        writes = world.state.writes
        world.publisher.ask_now()
        await asyncio.sleep(0.3)
        assert world.state.writes == writes
    # And one that starts finds it in place.
    async with publishing(cluster, tmp_path) as world:
        await world.put(*cards)
        assert world.state.writes == 0


async def test_a_taint_keeps_its_time(cluster: Cluster, tmp_path: Path) -> None:
    async with publishing(cluster, tmp_path) as world:
        await world.put(*rngd(3, sick=(0,)))
        ((name, before),) = (await world.taints()).items()
        # The API server's times have whole seconds: another one has begun.
        await asyncio.sleep(1.1)
        world.devices.publish(pool_of(*rngd(3, sick=(0, 2))))
        await eventually(lambda: _count(world.taints(), 2))
        after = await world.taints()
        assert after.pop(name) == before
        ((_, other),) = after.items()
        assert other["timeAdded"] > before["timeAdded"]


async def test_without_its_time_each_write_would_begin_a_taint_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with publishing(cluster, tmp_path) as world:
        await world.put(*rngd(1, sick=(0,)))
        ((_, before),) = (await world.taints()).items()
        await asyncio.sleep(1.1)
        await resourceslices.apply(world.api, world.wanted()[0])
        ((_, after),) = (await world.taints()).items()
        assert after["timeAdded"] > before["timeAdded"]


async def test_a_taint_makes_a_slice_of_more_than_64_devices_invalid(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with client(cluster, tmp_path) as api:
        uid = cluster.get("node", cluster.node_name)["metadata"]["uid"]

        def whole(*cards: CardState) -> dict[str, Any]:
            parts = slices(
                pool_of(*cards), driver=DRIVER, node=cluster.node_name, uid=uid, generation=1
            )
            spec = {
                **parts[0]["spec"],
                "devices": [device for part in parts for device in part["spec"]["devices"]],
            }
            return {**parts[0], "spec": spec}

        await resourceslices.apply(api, whole(*rngd(128)))
        with pytest.raises(ApiError) as caught:
            await resourceslices.apply(api, whole(*rngd(65, sick=(3,))))
        assert caught.value.status == 422
        assert "64" in str(caught.value)


# What others do.


async def test_slices_that_are_deleted_are_back(cluster: Cluster, tmp_path: Path) -> None:
    async with publishing(cluster, tmp_path) as world:
        await world.put(*rngd(70, sick=(1,)))
        before = await world.uids()
        started = time.monotonic()
        await asyncio.to_thread(cluster.kubectl, "delete", "resourceslices", "--all")
        await eventually(lambda: _all_new(world, before, 2), deadline=BACK)
        print(f"two slices are back in {time.monotonic() - started:.2f} s, with kubectl's time")
        assert len(await world.taints()) == 1


async def test_a_slice_that_is_deleted_while_its_write_is_under_way_is_back(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with publishing(cluster, tmp_path) as world:
        await world.put(*rngd(70))
        before = await world.uids()
        apply = resourceslices.apply

        async def late(api: Api, slice_: dict[str, Any]) -> dict[str, Any]:
            monkeypatch.undo()
            reply = await apply(api, slice_)
            await resourceslices.delete(api, slice_["metadata"]["name"])
            await first(world.publisher.state, lambda state: state.incomplete)
            return reply  # of before the event that was there first

        monkeypatch.setattr(resourceslices, "apply", late)
        world.devices.publish(pool_of(*rngd(70, sick=(1,))))
        await eventually(lambda: _all_but(world, before, 1), "the slice to be back", deadline=BACK)
        assert len(await world.taints()) == 1


async def test_two_hundred_cards_that_are_cut_on_demand(cluster: Cluster, tmp_path: Path) -> None:
    """Their list is longer than any object may be."""
    devices = pool_of(*rngd(200), partitions=True)
    async with publishing(cluster, tmp_path) as world:
        world.devices.publish(devices)
        await first(world.publisher.state, lambda state: state.published, deadline=60)
        size = len(json.dumps(world.publisher.live.value))
        print(f"{world.state.slices} slices with {world.state.devices} devices are {size} bytes")
        assert size > 2 * 2**20
    async with publishing(cluster, tmp_path) as world:
        world.devices.publish(devices)
        await first(world.publisher.state, lambda state: state.published, deadline=60)
        assert world.state.writes == 0


async def test_what_somebody_changes_is_put_right(cluster: Cluster, tmp_path: Path) -> None:
    async with publishing(cluster, tmp_path) as world:
        await world.put(*rngd(2))
        name = world.wanted()[0]["metadata"]["name"]
        patch = '{"spec": {"devices": [{"name": "npu-x"}]}}'
        change = ("patch", "resourceslice", name, "--type=merge", f"--patch={patch}")
        await asyncio.to_thread(cluster.kubectl, *change)
        await eventually(lambda: _in_place(world), deadline=BACK)


async def test_slices_are_back_after_a_kubelet_that_starts_has_deleted_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with publishing(cluster, tmp_path) as world:
        await world.put(*rngd(8))
        before = await world.uids()
        await asyncio.to_thread(cluster.stop_kubelet)
        started = asyncio.create_task(asyncio.to_thread(cluster.start_kubelet))
        await eventually(lambda: _not(world, before), "the kubelet to delete them", deadline=60)
        gone = time.monotonic()
        await eventually(lambda: _all_new(world, before, 1), deadline=BACK)
        print(f"after a kubelet's start they are back in {time.monotonic() - gone:.2f} s")
        await started
        # It deletes them once, and not when it is ready.
        after = await world.uids()
        await asyncio.sleep(2)
        assert await world.uids() == after


async def test_slices_of_a_node_that_was_created_again_are_its_own(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with publishing(cluster, tmp_path) as world:
        await world.put(*rngd(8))
        node = cluster.get("node", cluster.node_name)
        await asyncio.to_thread(cluster.kubectl, "delete", "node", cluster.node_name)
        # The garbage collector deletes them with the Node, and they do not come back without it.
        await eventually(lambda: _count(world.live(), 0), "the slices to be gone")
        await first(world.publisher.state, lambda state: state.trouble)
        meta = {"name": cluster.node_name, "labels": node["metadata"]["labels"]}
        again = {"apiVersion": "v1", "kind": "Node", "metadata": meta}
        await asyncio.to_thread(cluster.apply, again)
        created = time.monotonic()
        await eventually(lambda: _count(world.live(), 1), deadline=BACK)
        print(f"after the Node they are back in {time.monotonic() - created:.2f} s")
        (owner,) = (await world.live())[0]["metadata"]["ownerReferences"]
        uid = cluster.get("node", cluster.node_name)["metadata"]["uid"]
        assert owner["uid"] == uid != node["metadata"]["uid"]
        after = await world.uids()
        await asyncio.sleep(2)
        assert await world.uids() == after
        await asyncio.to_thread(
            cluster.wait_for, "the node to be ready", lambda: cluster._node_is_ready(0), 60
        )


# The scheduler, and claims.

CLASS = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": DRIVER},
    "spec": {
        "selectors": [
            {
                "cel": {
                    "expression": f'device.driver == "{DRIVER}" '
                    f'&& device.attributes["{DRIVER}"].cores == 8 '
                    f'&& device.attributes["{DRIVER}"].type == "card" '
                    f'&& device.attributes["{DRIVER}"].driverVersion'
                    '.isGreaterThan(semver("2025.3.0")) '
                    f'&& device.capacity["{DRIVER}"].memory'
                    '.compareTo(quantity("48Gi")) >= 0'
                }
            }
        ]
    },
}


def claim_and_pod(name: str, count: int) -> list[dict[str, Any]]:
    matching = {"requests": ["npus"], "matchAttribute": "resource.kubernetes.io/pcieRoot"}
    request = {"name": "npus", "exactly": {"deviceClassName": DRIVER, "count": count}}
    devices = {"requests": [request], **({"constraints": [matching]} if count == 1 else {})}
    container = {
        "name": "main",
        "image": settings.PAUSE_IMAGE,
        "imagePullPolicy": "Never",
        "resources": {"claims": [{"name": "npus"}]},
    }
    meta = {"name": name, "namespace": "default"}
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": meta,
            "spec": {"devices": devices},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "resourceClaims": [{"name": "npus", "resourceClaimName": name}],
                "containers": [container],
            },
        },
    ]


async def test_the_scheduler_allocates_what_is_published(cluster: Cluster, tmp_path: Path) -> None:
    async with publishing(cluster, tmp_path) as world:
        await world.put(card("warboy", 9), *rngd(3, sick=(0,)))
        names = [device.name for device in world.devices.value or ()]
        things = [CLASS, *claim_and_pod("one", 1), *claim_and_pod("two", 2)]
        await asyncio.to_thread(cluster.apply, things[:3])
        assert await resourceclaims.served(world.api)

        async def claim_of_pod(name: str) -> Claim:
            return resourceclaims.claim_of(
                await resourceclaims.get(world.api, "default", name), DRIVER
            )

        async def allocated(name: str) -> bool:
            found = await claim_of_pod(name)
            return found.allocated and bool(found.reserved_for)

        await eventually(lambda: allocated("one"))
        claim = await claim_of_pod("one")
        # The first card is tainted, and the last is a Warboy, which the class does not take.
        assert [(each.request, each.pool, each.device) for each in claim.results] == [
            ("npus", cluster.node_name, names[1])
        ]
        assert claim.reserved_for == ("one",)
        # Two more are not free until the sick card has recovered.
        await asyncio.to_thread(cluster.apply, things[3:])
        await asyncio.sleep(1)
        assert not await allocated("two")
        await world.put(card("warboy", 9), *rngd(3))
        await eventually(lambda: allocated("two"))
        results = (await claim_of_pod("two")).results
        assert sorted(each.device for each in results) == sorted([names[0], names[2]])
        gone = ("delete", "pods,resourceclaims", "--all", "--namespace=default", "--force")
        await asyncio.to_thread(cluster.kubectl, *gone)


async def test_many_claims_are_got_at_the_same_time(cluster: Cluster, tmp_path: Path) -> None:
    async with client(cluster, tmp_path) as api:
        await asyncio.to_thread(cluster.apply, [CLASS, claim_and_pod("c", 1)[0]])
        started = time.monotonic()
        found = await asyncio.gather(*(resourceclaims.get(api, "default", "c") for _ in range(100)))
        print(f"100 claims are got in {(time.monotonic() - started) * 1000:.0f} ms")
        assert {resourceclaims.claim_of(each, DRIVER).name for each in found} == {"c"}
        await asyncio.to_thread(cluster.kubectl, "delete", "resourceclaim", "c")


# The API server itself.


def restart_api_server(cluster: Cluster, *options: str) -> None:
    cluster._sandbox.terminate(cluster._state.processes["apiserver"], 2)
    start_api_server(cluster, *options)


def start_api_server(cluster: Cluster, *options: str) -> None:
    command = settings.apiserver(cluster.workdir / "config", cluster._audit_log)
    cluster._spawn("apiserver", [*command, *options])
    cluster._await_api_server()


async def test_slices_are_up_to_date_soon_after_an_outage(cluster: Cluster, tmp_path: Path) -> None:
    async with publishing(cluster, tmp_path) as world:
        await world.put(*rngd(8))
        await asyncio.to_thread(cluster.stop_api_server)
        world.devices.publish(pool_of(*rngd(8, sick=(3,))))
        await first(world.publisher.state, lambda state: state.trouble and not state.published)
        await asyncio.to_thread(start_api_server, cluster)
        started = time.monotonic()
        await first(world.publisher.state, lambda state: state.published, deadline=PAUSED)
        print(f"after an outage they are right in {time.monotonic() - started:.2f} s")
        assert len(await world.taints()) == 1
        await first(world.publisher.state, lambda state: state.trouble is None, deadline=PAUSED)


async def test_an_api_server_without_taints_gets_no_sick_card(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with publishing(cluster, tmp_path) as world:
        off = "--feature-gates=DRADeviceTaints=false,DRADeviceTaintRules=false"
        await asyncio.to_thread(restart_api_server, cluster, off)
        try:
            world.devices.publish(pool_of(*rngd(3, sick=(1,))))
            state = await first(world.publisher.state, lambda state: state.dropped)
            assert state.dropped == (TAINTS,)
            (there,) = await world.live()
            indexes = [each["attributes"]["index"]["int"] for each in there["spec"]["devices"]]
            assert indexes == [0, 2]
            writes = world.state.writes
            world.publisher.ask_now()
            await asyncio.sleep(0.5)
            assert world.state.writes == writes
        finally:
            await asyncio.to_thread(restart_api_server, cluster)
        await eventually(lambda: _count(world.taints(), 1), deadline=60)
        assert world.state.dropped == ()


async def eventually(
    condition: Callable[[], Awaitable[bool]], what: str = "", *, deadline: float = 30.0
) -> None:
    """Waits for what the API server is asked for, 20 times a second."""
    await until(condition, what, deadline=deadline, interval=0.05)


async def _count(found: Any, number: int) -> bool:
    return len(await found) == number


async def _not(world: World, before: list[str]) -> bool:
    return await world.uids() != before


async def _all_new(world: World, before: list[str], number: int) -> bool:
    found = await world.uids()
    return len(found) == number and not set(found) & set(before)


async def _all_but(world: World, before: list[str], number: int) -> bool:
    """Whether there are as many as before, of which so many are new."""
    found = await world.uids()
    return len(found) == len(before) and len(set(found) - set(before)) == number


async def _in_place(world: World) -> bool:
    return not any(
        differs(there, sent) for there, sent in zip(await world.live(), world.wanted(), strict=True)
    )
