"""A client on gRPC's C core, which behaves differently from grpclib's: raw bytes in and out.

Its calls block, so that tests on an event loop make them with `asyncio.to_thread`.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from grpclib.client import Channel, Stream
from grpclib.config import Configuration
from grpclib.const import Cardinality
from grpclib.exceptions import StreamTerminatedError

from npu_agent.kubelet.rpc import Encoded
from npu_agent.kubelet.wire import v1beta1 as wire

DEADLINE = 20.0
"""Seconds; guards against hanging and measures nothing."""


class Client:
    """A connection to a plugin's socket, for one of its services."""

    def __init__(self, path: Path, service: str = "v1beta1.DevicePlugin") -> None:
        self._service = service
        self.channel: Any = grpc.insecure_channel(
            f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def call(self, method: str, request: bytes = b"") -> bytes:
        """Raises grpc.RpcError."""
        unary = self.channel.unary_unary(f"/{self._service}/{method}")
        answer: bytes = unary(request, timeout=DEADLINE, wait_for_ready=True)
        return answer

    def refused(self, method: str, request: bytes = b"") -> tuple[str, str]:
        """The status and the message of a call that has to fail."""
        try:
            answer = self.call(method, request)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError(f"{method} was answered with {answer!r}")

    def allocate(self, *ids: str) -> wire.ContainerAllocateResponse:
        response = wire.AllocateResponse().parse(self.call("Allocate", allocation(*ids)))
        return response.container_responses[0]

    def watch(self) -> Any:
        """A ListAndWatch call: yields the encoded lists, and can be cancelled."""
        stream = self.channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")
        return stream(b"", timeout=DEADLINE * 3, wait_for_ready=True)

    def close(self) -> None:
        self.channel.close()


def allocation(*ids: str) -> bytes:
    return bytes(
        wire.AllocateRequest(
            container_requests=[wire.ContainerAllocateRequest(devices_ids=list(ids))]
        )
    )


def preference(available: list[str], size: int) -> bytes:
    return bytes(
        wire.PreferredAllocationRequest(
            container_requests=[
                wire.ContainerPreferredAllocationRequest(
                    available_device_i_ds=available, allocation_size=size
                )
            ]
        )
    )


def listed(messages: Iterator[bytes]) -> list[tuple[str, str]]:
    """(ID, health) of each device in the next message of a stream."""
    response = wire.ListAndWatchResponse().parse(next(messages))
    return [(device.id, device.health) for device in response.devices]


@asynccontextmanager
async def asleep(path: Path) -> AsyncIterator[Stream[wire.Empty, Encoded]]:
    """A ListAndWatch call of which nothing is read yet, by grpclib.

    It grants the server 64 KiB, as HTTP/2 does at first; the C core would go on granting more.
    """
    window = (1 << 16) - 1
    config = Configuration(http2_connection_window_size=window, http2_stream_window_size=window)
    method = "/v1beta1.DevicePlugin/ListAndWatch"
    async with (
        Channel(path=str(path), config=config) as channel,
        channel.request(method, Cardinality.UNARY_STREAM, wire.Empty, Encoded) as stream,
    ):
        await stream.send_message(wire.Empty(), end=True)
        yield stream
        with suppress(StreamTerminatedError):  # by the server's end
            await stream.cancel()
