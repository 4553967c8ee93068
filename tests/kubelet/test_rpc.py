"""Peers that misbehave: what a server does to our calls, and a client to our server."""

import asyncio
import os
import socket as sockets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from grpclib.const import Cardinality, Handler
from grpclib.protocol import H2Protocol
from grpclib.server import Stream

from npu_agent import files
from npu_agent.kubelet.rpc import (
    Encoded,
    UnixServer,
    ask,
    receive_request,
    sweep,
)
from npu_agent.kubelet.wire import v1beta1 as wire
from tests.outputs.deviceplugin.helpers import names, short_directory

DEADLINE = 20.0
"""Seconds; guards against hanging and measures nothing."""
METHOD = "/v1beta1.Registration/Register"


class Registration:
    """Answers with the name of the resource."""

    def __mapping__(self) -> dict[str, Handler]:
        unary = Cardinality.UNARY_UNARY
        return {METHOD: Handler(self._register, unary, wire.RegisterRequest, Encoded)}

    async def _register(self, stream: Stream[wire.RegisterRequest, Encoded]) -> None:
        request = await receive_request(stream)
        await stream.send_message(Encoded(request.resource_name.encode()))


@pytest.fixture
async def socket() -> AsyncIterator[Path]:
    with short_directory() as directory:
        yield directory / "kubelet.sock"


@pytest.fixture
async def server(socket: Path) -> AsyncIterator[UnixServer]:
    one = UnixServer([Registration()], socket)
    await one.listen()
    yield one
    await one.shutdown()


@contextmanager
def connected(path: Path) -> Iterator[sockets.socket]:
    with sockets.socket(sockets.AF_UNIX) as client:
        client.connect(str(path))
        yield client


def request(name: str = "r/r") -> bytes:
    return bytes(wire.RegisterRequest(resource_name=name))


async def test_a_call_that_is_given_up_takes_its_connection_with_it(socket: Path) -> None:
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1024):
            pass
        writer.close()
        ended.set()

    async with await asyncio.start_unix_server(silent, socket):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ask(socket, METHOD)
        async with asyncio.timeout(DEADLINE):
            await ended.wait()


def closed_when_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each connection of the running loop closed before anything is sent on it."""
    loop = asyncio.get_running_loop()
    connect = loop.create_unix_connection

    async def connect_and_be_closed(
        factory: Callable[[], H2Protocol], path: str, **_: object
    ) -> tuple[asyncio.Transport, H2Protocol]:
        transport, protocol = await connect(factory, path)
        while not protocol.connection.is_closing():
            await asyncio.sleep(0.001)
        return transport, protocol

    monkeypatch.setattr(loop, "create_unix_connection", connect_and_be_closed)


async def test_a_server_that_accepts_and_closes(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the connection is found closed before anything was sent on it."""
    closed_when_connected(monkeypatch)
    async with await asyncio.start_unix_server(lambda _, writer: writer.close(), socket):
        with pytest.raises(ConnectionResetError, match="it closes the connection"):
            await ask(socket, METHOD)


@pytest.mark.parametrize("turns", range(6))
async def test_a_client_that_comes_as_the_server_ends_sees_the_end(
    socket: Path, server: UnixServer, turns: int
) -> None:
    # asyncio takes some turns of the loop from a connection that it accepts to its protocol.
    with connected(socket) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.shutdown()
        client.settimeout(DEADLINE)
        with suppress(ConnectionResetError):
            while await asyncio.to_thread(client.recv, 4096):  # the first frame, if any
                pass


async def test_the_longest_path_that_linux_takes_is_served(socket: Path) -> None:
    room = 107 - len(os.fsencode(socket.parent)) - 1
    longest = UnixServer([Registration()], socket.parent / ("s" * room))
    await longest.listen()
    assert await ask(longest.path, METHOD, request()) == b"r/r"
    await longest.shutdown()
    path = socket.parent / ("s" * (room + 1))
    with pytest.raises(OSError, match=f"{path} has 108 bytes and Linux takes 107"):
        await UnixServer([Registration()], path).listen()


async def test_sockets_of_the_dead_are_swept(socket: Path, server: UnixServer) -> None:
    for name in ("kubelet-dead.sock", "other.sock"):
        with sockets.socket(sockets.AF_UNIX) as dead:
            dead.bind(str(socket.with_name(name)))
    socket.with_name("kubelet-notes.sock").write_text("a file, not a socket", encoding="utf-8")
    sweep(socket.parent, r"kubelet.*\.sock")
    assert names(socket.parent) == ["kubelet-notes.sock", "kubelet.sock", "other.sock"]
    assert server.exists()


async def test_a_live_socket_is_never_taken_over(socket: Path, server: UnixServer) -> None:
    with pytest.raises(OSError, match=f"in use: '{socket}'"):
        await UnixServer([], socket).listen()
    assert server.exists()


async def test_server_whose_socket_is_swept_at_its_start_does_not_stay_behind(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = files.identity

    def swept(path: Path) -> tuple[int, int]:
        socket.unlink()
        return identity(path)

    monkeypatch.setattr(files, "identity", swept)
    with pytest.raises(FileNotFoundError, match=str(socket)):
        await UnixServer([], socket).listen()
    assert str(socket) not in Path("/proc/net/unix").read_text(
        encoding="utf-8"
    )  # no process listens


async def test_an_end_that_is_cancelled_leaves_no_socket(socket: Path, server: UnixServer) -> None:
    ending = asyncio.create_task(server.shutdown())
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert not socket.exists()


async def test_a_socket_that_was_replaced_is_not_ours(socket: Path, server: UnixServer) -> None:
    socket.rename(socket.with_name("moved.sock"))
    assert not server.exists()
    socket.write_text("another program's", encoding="utf-8")
    assert not server.exists()
    await server.shutdown()
    assert socket.read_text(encoding="utf-8") == "another program's"
