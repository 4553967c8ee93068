"""The gRPC service over a real socket, asked by gRPC's C core, and the bytes that it writes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from grpclib.exceptions import StreamTerminatedError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from npu_agent.core.grant import Grant, Refusal, RefusalError
from npu_agent.core.hardware import HealthState
from npu_agent.core.offer import Device
from npu_agent.core.preferred_allocation import Choice, prefer
from npu_agent.feed import Feed
from npu_agent.kubelet.rpc import Encoded, UnixServer, wait_drained
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.outputs.deviceplugin.service import (
    DevicePlugin,
    Devices,
    container_response,
    device_list,
)
from tests.outputs.deviceplugin.allocator import StandInAllocator
from tests.outputs.deviceplugin.client import (
    DEADLINE,
    Client,
    allocation,
    asleep,
    preference,
)
from tests.outputs.deviceplugin.helpers import crowd, devices, short_directory, state
from tests.until import first

RESOURCE = "beta.furiosa.ai/npu"
NO_MESSAGE = b"\xff" * 11
"""A number that is too long: no protobuf."""
LISTED = devices(
    state(index=0, id_="UUID-A", numa_node=0),
    state(index=1, id_="UUID-B", numa_node=1),
    state(index=2, id_="UUID-BAD", health=HealthState.UNHEALTHY, reason="heiß: 99 °C"),
)


@dataclass
class Served:
    devices: Feed[Devices]
    plugin: DevicePlugin
    server: UnixServer
    client: Client

    async def streams(self, number: int) -> None:
        """Waits until so many ListAndWatch streams are open."""
        await first(self.plugin.streams, lambda streams: streams == number)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        feed: Feed[Devices] = Feed(LISTED)
        plugin = DevicePlugin(RESOURCE, feed, StandInAllocator(feed))
        server = UnixServer([plugin], directory / "npu.sock")
        await server.listen()
        client = Client(server.path)
        yield Served(feed, plugin, server, client)
        await asyncio.to_thread(client.close)
        await server.shutdown()


async def test_allocate(served: Served) -> None:
    given = await asyncio.to_thread(served.client.allocate, "UUID-B", "UUID-A")
    assert given.envs == {
        "NPU_DEVNAME": "npu0pe0-1,npu1pe0-1",
        "FURIOSA_DEVICES": "npu:0:0-1,npu:1:0-1",
    }
    assert [device.host_path for device in given.devices] == [
        f"/dev/{node}" for device in LISTED[:2] for node in device.nodes
    ]


async def test_preferred_allocation(served: Served) -> None:
    request = preference(["UUID-B", "UUID-A"], 1)
    answer = await asyncio.to_thread(served.client.call, "GetPreferredAllocation", request)
    response = wire.PreferredAllocationResponse().parse(answer)
    assert [one.device_i_ds for one in response.container_responses] == [["UUID-A"]]
    assert served.plugin.counts.preferred == {"one card": 1}
    # The kubelet asks for this only if it is an option.
    answer = await asyncio.to_thread(served.client.call, "GetDevicePluginOptions")
    assert wire.DevicePluginOptions().parse(answer).get_preferred_allocation_available


async def test_the_loop_goes_on_between_two_containers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet asks for one container; another client may ask for thousands."""
    turns, at = 0, list[int]()

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def noted(*asked: Any) -> Choice:
        at.append(turns)
        return prefer(*asked)

    monkeypatch.setattr("npu_agent.outputs.deviceplugin.service.prefer", noted)
    other = asyncio.create_task(turn())
    request = preference(["UUID-B", "UUID-A"], 1) * 20
    await asyncio.to_thread(served.client.call, "GetPreferredAllocation", request)
    other.cancel()
    assert len(set(at)) == 20


@pytest.mark.parametrize(
    ("method", "request_", "status", "message"),
    [
        ("Allocate", allocation(), "INVALID_ARGUMENT", f"Allocate for {RESOURCE} names no device"),
        ("Allocate", allocation("UUID-Z"), "NOT_FOUND", "device 'UUID-Z' is not one of"),
        (
            "Allocate",
            allocation("UUID-BAD"),
            "FAILED_PRECONDITION",
            "device 'UUID-BAD' (npu2) is unhealthy: heiß: 99 °C",
        ),
        ("GetPreferredAllocation", b"", "INVALID_ARGUMENT", "the request names no container"),
        (
            "GetPreferredAllocation",
            preference(["UUID-A"], 2),
            "INVALID_ARGUMENT",
            "allocation_size is 2: 1 devices are available",
        ),
        ("Allocate", NO_MESSAGE, "INVALID_ARGUMENT", "the request cannot be decoded: "),
        ("Explode", b"", "UNIMPLEMENTED", "Method not found"),
    ],
)
async def test_wrong_request_gets_a_precise_status_and_message(
    served: Served, method: str, request_: bytes, status: str, message: str
) -> None:
    found_status, found = await asyncio.to_thread(served.client.refused, method, request_)
    assert (found_status, found[: len(message)]) == (status, message)
    # And the plugin works on.
    assert await asyncio.to_thread(served.client.allocate, "UUID-A")


@pytest.mark.parametrize("method", ["Allocate", "ListAndWatch", "GetDevicePluginOptions"])
async def test_call_without_any_message_is_refused(served: Served, method: str) -> None:
    call = served.client.channel.stream_unary(f"/v1beta1.DevicePlugin/{method}")
    with pytest.raises(grpc.RpcError) as error:
        await asyncio.to_thread(call, iter(()), timeout=DEADLINE, wait_for_ready=True)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details() == "the call carries no request"


async def test_closed_feed_ends_the_stream_in_order(served: Served) -> None:
    stream = served.client.watch()
    await asyncio.to_thread(next, stream)
    served.devices.close()
    assert await asyncio.to_thread(list, stream) == []
    assert stream.code() is grpc.StatusCode.OK
    await served.streams(0)


async def test_a_slow_reader_delays_no_other_and_skips_values_that_it_missed(
    served: Served,
) -> None:
    many = crowd(2000)
    served.devices.publish(many)
    async with asleep(served.server.path) as sleeper:
        await served.streams(1)
        for turn in range(50):
            served.devices.publish(many[turn:])
            await asyncio.sleep(0)
        last = (*LISTED, *many)
        served.devices.publish(last)
        assert await asyncio.to_thread(served.client.allocate, "UUID-A")

        assert await sleeper.recv_message() == Encoded(device_list(many))
        assert await sleeper.recv_message() == Encoded(device_list(last))
    await served.streams(0)


async def test_the_end_does_not_wait_for_a_reader_that_sleeps(served: Served) -> None:
    served.devices.publish(crowd(2000))  # sending it waits for a reader
    async with asleep(served.server.path) as sleeper:
        await served.streams(1)
        served.devices.close()
        async with asyncio.timeout(DEADLINE):
            await wait_drained(served.plugin.streams)
            await served.server.shutdown()
        with pytest.raises(StreamTerminatedError):
            await sleeper.recv_message()


async def test_allocations_are_counted_by_how_they_end(served: Served) -> None:
    assert await asyncio.to_thread(served.client.allocate, "UUID-A", "UUID-B")
    assert await asyncio.to_thread(served.client.allocate, "UUID-A")
    for request in (
        allocation(),
        NO_MESSAGE,
        allocation("UUID-Z"),
        allocation("UUID-BAD"),
        b"\x0b",  # wire type 3 for a message: betterproto reads a None
    ):
        await asyncio.to_thread(served.client.refused, "Allocate", request)
    assert served.plugin.counts.allocations == {
        "granted": 2,
        "invalid": 2,
        "unknown": 1,
        "unhealthy": 1,
        "failed": 1,
    }
    seconds = served.plugin.counts.allocation_seconds
    assert sum(seconds.counts) == 7
    assert 0 < seconds.total < DEADLINE


async def test_the_ledger_is_asked_before_the_answer_and_may_refuse(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[str, list[str]]] = []

    async def grant(_: StandInAllocator, resource: str, devices: Sequence[Device]) -> None:
        noted.append((resource, [device.id for device in devices]))
        if len(noted) > 1:
            raise RefusalError(Refusal.UNFIT, "Pod team/train still holds its cores")

    monkeypatch.setattr(StandInAllocator, "grant", grant)
    await asyncio.to_thread(served.client.allocate, "UUID-B", "UUID-A")
    assert noted == [(RESOURCE, ["UUID-B", "UUID-A"])]
    refused = await asyncio.to_thread(served.client.refused, "Allocate", allocation("UUID-A"))
    assert refused == ("FAILED_PRECONDITION", "Pod team/train still holds its cores")


# Lengths on both sides of where a varint needs one more byte, and text of more than one byte.
LONG = ["", "a", "é", "x" * 127, "x" * 128, "ü" * 64, "x" * 16_383, "x" * 16_384]
TEXT = st.sampled_from(LONG) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)
WORDS = TEXT.filter(bool)


def made(id_: str, healthy: bool, numa: int | None) -> Device:
    (device,) = devices(state(numa_node=numa))
    return replace(device, id=id_, healthy=healthy)


some_device = st.builds(
    made, WORDS, st.booleans(), st.none() | st.sampled_from((0, 1, 127, 128, 65_535))
)
some_grant = st.builds(
    Grant,
    environment=st.dictionaries(WORDS, TEXT, max_size=5).map(lambda found: tuple(found.items())),
    nodes=st.lists(st.tuples(WORDS, WORDS), max_size=5).map(tuple),
    cdi_names=st.lists(WORDS, max_size=5).map(tuple),
)


def list_of(devices: list[Device]) -> wire.ListAndWatchResponse:
    """The message as the generated classes would build it."""
    return wire.ListAndWatchResponse(
        devices=[
            wire.Device(
                id=device.id,
                health="Healthy" if device.healthy else "Unhealthy",
                topology=None  # type: ignore[arg-type]
                if device.card.numa_node is None
                else wire.TopologyInfo(nodes=[wire.NumaNode(id=device.card.numa_node)]),
            )
            for device in devices
        ]
    )


def response_of(granted: Grant, by_cdi: bool) -> wire.AllocateResponse:
    container = wire.ContainerAllocateResponse(envs=dict(granted.environment))
    if by_cdi:
        container.cdi_devices = [wire.CdiDevice(name=name) for name in granted.cdi_names]
    else:
        container.devices = [
            wire.DeviceSpec(container_path=path, host_path=host_path, permissions="rw")
            for path, host_path in granted.nodes
        ]
    return wire.AllocateResponse(container_responses=[container])


@settings(max_examples=30)
@given(st.lists(some_device, max_size=8))
@example([made("Ä" * 70, healthy=True, numa=0)])
def test_device_list_is_byte_for_byte_what_betterproto_writes(found: list[Device]) -> None:
    encoded = device_list(found)
    assert encoded == bytes(list_of(found))
    assert wire.ListAndWatchResponse().parse(encoded).to_dict() == list_of(found).to_dict()


@settings(max_examples=30)
@given(some_grant, st.booleans())
def test_container_response_is_what_betterproto_writes(granted: Grant, by_cdi: bool) -> None:
    encoded = container_response(granted, by_cdi=by_cdi)
    parsed = wire.AllocateResponse().parse(encoded)
    assert parsed.to_dict() == response_of(granted, by_cdi).to_dict()
    if all(value for _, value in granted.environment):  # betterproto leaves an empty one out
        assert encoded == bytes(response_of(granted, by_cdi))
