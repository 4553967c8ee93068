"""A client on gRPC's C core, which behaves differently from grpclib's: raw bytes in and out.

Its calls block, so that tests on an event loop make them with `asyncio.to_thread`.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from h2.connection import H2Connection
from h2.events import DataReceived

from npu_agent.kubelet.wire import v1beta1 as wire

DEADLINE = 20.0
"""Seconds; guards against hanging and measures nothing."""


class Client:
    """A connection to a device plugin's socket."""

    def __init__(self, path: Path) -> None:
        self.channel: Any = grpc.insecure_channel(
            f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def call(self, method: str, request: bytes = b"") -> bytes:
        """Raises grpc.RpcError."""
        unary = self.channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
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


def preference(available: list[str], size: int, must: list[str] | None = None) -> bytes:
    return bytes(
        wire.PreferredAllocationRequest(
            container_requests=[
                wire.ContainerPreferredAllocationRequest(
                    available_device_i_ds=available,
                    must_include_device_i_ds=must or [],
                    allocation_size=size,
                )
            ]
        )
    )


def listed(messages: Iterator[bytes]) -> list[tuple[str, str]]:
    """(ID, health) of each device in the next message of a stream."""
    response = wire.ListAndWatchResponse().parse(next(messages))
    return [(device.id, device.health) for device in response.devices]


class Sleeper:
    """A ListAndWatch client on the bare protocol that reads nothing until it is told to.

    It grants the server 64 KiB, as HTTP/2 does at first; the C core would go on granting more.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(DEADLINE)
        self._socket.connect(str(path))
        self._http = H2Connection()
        self._http.initiate_connection()
        self._http.send_headers(
            1,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", "/v1beta1.DevicePlugin/ListAndWatch"),
                (":authority", "localhost"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
            ],
        )
        self._http.send_data(1, bytes(5), end_stream=True)  # one empty message
        self._socket.sendall(self._http.data_to_send())

    def read(self) -> Iterator[bytes]:
        """Wakes up: each message until the connection ends."""
        pending = b""
        while received := self._socket.recv(1 << 16):
            for event in self._http.receive_data(received):
                if isinstance(event, DataReceived):
                    pending += event.data or b""
                    self._http.acknowledge_received_data(event.flow_controlled_length or 0, 1)
            with suppress(BrokenPipeError):  # it ended; what it sent can still be read
                self._socket.sendall(self._http.data_to_send())
            while len(pending) >= 5 and len(pending) >= (end := 5 + int.from_bytes(pending[1:5])):
                yield pending[5:end]
                pending = pending[end:]

    def close(self) -> None:
        self._socket.close()
