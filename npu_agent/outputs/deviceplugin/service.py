"""The gRPC side of a device plugin: answers the kubelet's calls from the devices.

Lists and grants are written as protobuf directly from our own values: betterproto needs about
0.1 ms for each device and 5 ms for an Allocate of 8 cards, on the event loop (bench/). These
messages are nested strings; tests compare every byte. Field numbers: protos/deviceplugin.proto.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from npu_agent.core.counts import Counts
from npu_agent.core.grant import Grant, Refusal, RefusalError, grant, requested
from npu_agent.core.offer import Device
from npu_agent.core.preferred_allocation import Choice, prefer
from npu_agent.feed import Feed
from npu_agent.kubelet.allocator import Allocator
from npu_agent.kubelet.rpc import (
    Cardinality,
    Encoded,
    GRPCError,
    Handler,
    Status,
    Stream,
    count_call,
    receive_request,
)
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.logs import logger

log = logger(__name__)

Devices = tuple[Device, ...]

_STATUS = {
    Refusal.INVALID: Status.INVALID_ARGUMENT,
    Refusal.UNKNOWN: Status.NOT_FOUND,
    Refusal.UNFIT: Status.FAILED_PRECONDITION,
    Refusal.HELD: Status.FAILED_PRECONDITION,
}
_RESULT = {
    Status.INVALID_ARGUMENT: "invalid",
    Status.NOT_FOUND: "unknown",
    Status.FAILED_PRECONDITION: "unhealthy",
}
"""Of `counts.RESULTS`."""


def options() -> wire.DevicePluginOptions:
    """Returns the plugin's options: the kubelet asks us which devices to prefer."""
    return wire.DevicePluginOptions(get_preferred_allocation_available=True)


class DevicePlugin:
    """Serves the devices of one resource."""

    def __init__(
        self,
        resource: str,
        devices: Feed[Devices],
        allocator: Allocator,
        *,
        by_cdi: bool = False,
    ) -> None:
        self.devices = devices
        """What is served now; closing it ends the streams."""
        self.streams: Feed[int] = Feed(0)
        """Open streams of ListAndWatch; the kubelet holds one."""
        self.opened: Feed[int] = Feed(0)
        """Streams since the start: shows one that opened and ended unseen."""
        self.allocating: Feed[int] = Feed(0)
        self.counts = Counts()
        self._resource = resource
        self._allocator = allocator
        self._by_cdi = by_cdi

    def __mapping__(self) -> dict[str, Handler]:
        unary = Cardinality.UNARY_UNARY
        stream = Cardinality.UNARY_STREAM
        table: dict[str, tuple[Callable[[Any], Coroutine[Any, Any, None]], Cardinality, Any]] = {
            "GetDevicePluginOptions": (self._options, unary, wire.Empty),
            "ListAndWatch": (self._list_and_watch, stream, wire.Empty),
            "GetPreferredAllocation": (self._prefer, unary, wire.PreferredAllocationRequest),
            "Allocate": (self._allocate, unary, wire.AllocateRequest),
            "PreStartContainer": (self._pre_start, unary, wire.PreStartContainerRequest),
        }
        return {
            f"/v1beta1.DevicePlugin/{name}": Handler(handler, cardinality, request, Encoded)
            for name, (handler, cardinality, request) in table.items()
        }

    def _known(self) -> dict[str, Device]:
        return {device.id: device for device in self.devices.value}

    async def _options(self, stream: Stream[wire.Empty, Encoded]) -> None:
        await receive_request(stream)
        await stream.send_message(Encoded(bytes(options())))

    async def _list_and_watch(self, stream: Stream[wire.Empty, Encoded]) -> None:
        await receive_request(stream)
        self.opened.publish(self.opened.value + 1)
        with count_call(self.streams):
            async for devices in self.devices.watch():
                await stream.send_message(Encoded(device_list(devices)))
                self.counts.messages += 1
                log.debug("device list sent", resource=self._resource, devices=len(devices))

    async def _prefer(self, stream: Stream[wire.PreferredAllocationRequest, Encoded]) -> None:
        request = await receive_request(stream)
        if not request.container_requests:
            raise GRPCError(Status.INVALID_ARGUMENT, "the request names no container")
        choices: list[Choice] = []
        for container in request.container_requests:
            with _refusals_as_status():
                choices.append(
                    prefer(
                        container.available_device_i_ds,
                        container.must_include_device_i_ds,
                        container.allocation_size,
                        self._known(),
                        self._allocator.degraded.value,
                    )
                )
            await asyncio.sleep(0)  # the kubelet asks for one container; others may ask for many
        for choice in choices:
            self.counts.preferred[choice.reason] += 1
            log.debug(
                "allocation preferred",
                resource=self._resource,
                devices=",".join(choice.ids),
                reason=choice.reason,
            )
        response = wire.PreferredAllocationResponse(
            container_responses=[
                wire.ContainerPreferredAllocationResponse(device_i_ds=list(choice.ids))
                for choice in choices
            ]
        )
        await stream.send_message(Encoded(bytes(response)))

    async def _allocate(self, stream: Stream[wire.AllocateRequest, Encoded]) -> None:
        began = time.perf_counter()
        result = "failed"
        try:
            with count_call(self.allocating):
                granted = await self._grant(stream)
            result = "granted"
        except GRPCError as error:
            result = _RESULT.get(error.status, result)
            raise
        finally:
            self.counts.allocated(result, time.perf_counter() - began)
        log.info("allocated", resource=self._resource, devices=", ".join(granted))

    async def _grant(self, stream: Stream[wire.AllocateRequest, Encoded]) -> list[str]:
        """Answers an Allocate; returns names and IDs of the devices."""
        request = await receive_request(stream)
        ids = [container.devices_ids for container in request.container_requests]
        with _refusals_as_status():
            try:
                containers = requested(ids, self._known(), self._resource)
                devices = [device for container in containers for device in container]
                await self._allocator.grant(self._resource, devices)
            except RefusalError as error:
                log.warning("allocation refused", resource=self._resource, reason=error)
                raise
        body = b"".join(
            container_response(grant(container), by_cdi=self._by_cdi) for container in containers
        )
        await stream.send_message(Encoded(body))
        await stream.send_trailing_metadata()  # a Pod waits for it; the log can wait
        return [f"{device.name} ({device.id})" for device in devices]

    async def _pre_start(self, stream: Stream[wire.PreStartContainerRequest, Encoded]) -> None:
        await receive_request(stream)
        await stream.send_message(Encoded(b""))  # never asked for; nothing to do


@contextlib.contextmanager
def _refusals_as_status() -> Iterator[None]:
    try:
        yield
    except RefusalError as error:
        raise GRPCError(_STATUS[error.kind], str(error)) from error


def device_list(devices: Iterable[Device]) -> bytes:
    """Encodes a ListAndWatchResponse. Without a NUMA node there is no TopologyInfo."""
    return b"".join(_device(d.id, d.healthy, d.card.numa_node) for d in devices)


def container_response(given: Grant, *, by_cdi: bool = False) -> bytes:
    """Encodes one container's part of an AllocateResponse; `by_cdi`: CDI names, no nodes."""
    fields = [
        _field(1, _field(1, variable.encode()) + _field(2, value.encode()))
        for variable, value in given.environment
    ]
    if by_cdi:
        fields += [_field(5, _field(1, name.encode())) for name in given.cdi_names]
    else:
        fields += [
            _field(3, _field(1, path.encode()) + _field(2, host_path.encode()) + _field(3, b"rw"))
            for path, host_path in given.nodes
        ]
    return _field(1, b"".join(fields))


def _device(id_: str, healthy: bool, numa_node: int | None) -> bytes:
    body = _field(1, id_.encode()) + _field(2, b"Healthy" if healthy else b"Unhealthy")
    if numa_node is not None:
        # NUMANode{ID=0} is an empty message: proto3 does not write zeros.
        node = b"\x08" + _varint(numa_node) if numa_node else b""
        body += _field(3, _field(1, node))
    return _field(1, body)


def _field(number: int, content: bytes) -> bytes:
    length = len(content)
    if length <= 0x7F:  # as nearly all are: half the time of an Allocate's answer
        return bytes((number << 3 | 2, length)) + content
    return bytes((number << 3 | 2,)) + _varint(length) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
