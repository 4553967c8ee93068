"""What grpclib leaves to be done: a server that can be closed, calls without side effects, bounds.

All that the agent uses of grpclib's private parts is here, because there is no public way:

- `Server._protocol_factory`, overridden to know the open connections: `Server` neither lists nor
  closes them, and `listen(server, ...)` has events for calls only.
- `Stream._wrapper` and `Stream._stream.recv_data`, to receive a message in pieces: `recv_message`
  takes one of any size, and grpclib's `Configuration` has no limit for it.
- `grpclib._typing.IServable`, a type, for the type checker.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server

if TYPE_CHECKING:
    from grpclib import client, server
    from grpclib._typing import IServable

T = TypeVar("T")

_PIECE = 1 << 16
"""Bytes of a message that are taken from grpclib at a time."""


async def apart(call: Coroutine[Any, Any, T]) -> T:
    """Awaits a call to a gRPC server in its own task; returns or raises what it does.

    When a connection is lost or a deadline passes, grpclib wakes whoever waits by cancelling the
    task, raises its own error there, and never takes the cancellation back (`Task.uncancel`). In
    the caller's task that would stay for life: under Python 3.11.2 each later `asyncio.timeout`
    that runs out would raise CancelledError instead of TimeoutError, and a TaskGroup could take it
    for its own end.
    """
    return await asyncio.create_task(call)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message that is encoded already, in the form that grpclib's codec asks for."""

    encoded: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        """The message, for grpclib."""
        return self.encoded


async def received(stream: server.Stream[T, Encoded]) -> T:
    """The request of a call that a handler has to answer.

    Raises:
        GRPCError: INVALID_ARGUMENT, as there is none, or it is not the message it should be.
    """
    try:
        request = await stream.recv_message()
    except (GRPCError, StreamTerminatedError):
        raise
    except Exception as error:  # betterproto has no error type of its own for broken input
        raise GRPCError(
            Status.INVALID_ARGUMENT, f"the request cannot be decoded: {error}"
        ) from error
    if request is None:
        raise GRPCError(Status.INVALID_ARGUMENT, "the call carries no request")
    return request


async def receive_bounded(stream: client.Stream[Any, Any], most: int) -> bytearray | None:
    """Receives the message that `stream.recv_message` would, still encoded.

    grpclib takes a message of any size, and copies it in one go. Here it is taken piece by piece
    from the HTTP/2 stream below, once the five bytes before it (whether it is compressed, and its
    length: the gRPC over HTTP/2 protocol) show that it is not too large.

    Args:
        stream: of a call, its initial metadata received.
        most: bytes that the message may have.

    Returns:
        The message; None if the call ends without one.

    Raises:
        ValueError: it is too large, compressed, or ends early.
    """
    with stream._wrapper:  # noqa: SLF001 (it ends the wait when the connection ends)
        receive = stream._stream.recv_data  # noqa: SLF001
        try:
            prefix = await receive(5)
            if not prefix:
                return None
            compressed, length = struct.unpack(">?I", prefix)
            if compressed:
                raise ValueError("the answer is compressed, and nobody asked for that")
            if length > most:
                raise ValueError(f"the answer has {length:,} bytes, and the limit is {most:,}")
            message = bytearray()
            while missing := length - len(message):
                piece = await receive(min(_PIECE, missing))
                if not piece:
                    break
                message += piece
                await asyncio.sleep(0)
        except AssertionError:  # grpclib's for a stream that ends within a piece
            missing = True
    if missing:
        raise ValueError("the answer is cut off")
    return message


class UnixServer(Server):
    """Serves gRPC on a unix socket, knows its connections, and closes them when it ends.

    grpclib's own `close` sends nothing and leaves connections open, so that a client would wait for
    ever on a stream that no one serves; and its `wait_closed` hangs from Python 3.12.1 on while a
    client is connected.
    """

    def __init__(self, handlers: Collection[IServable], path: Path) -> None:
        super().__init__(handlers)
        self.path = path
        self._connections: WeakSet[H2Protocol] = WeakSet()
        self._inode: int | None = None

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self._connections.add(protocol)
        return protocol

    async def listen(self) -> None:
        """Starts to serve on `path`, which must not exist.

        Raises:
            OSError: the socket cannot be made, or is somebody's already.
        """
        if self.path.exists():
            # asyncio would take over somebody's live socket without a word.
            raise FileExistsError(f"{self.path} exists already")
        # To its end, which is near: asyncio leaves a socket that listens behind if it is cancelled.
        starting = asyncio.create_task(self.start(path=str(self.path)))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await starting
                self.close()
                self.path.unlink()
            raise
        try:
            self._inode = self.path.stat().st_ino
        except OSError:  # swept already: a kubelet starts at this very moment
            self.close()
            raise

    def exists(self) -> bool:
        """Whether the socket is still where it was made, and still ours."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    async def shutdown(self) -> None:
        """Ends every connection and removes the socket; takes 0.2 s at most.

        Streams that should end in order have to be let return before.
        """
        self.close()
        for protocol in list(self._connections):
            if hasattr(protocol, "connection"):  # not if it was accepted just now
                protocol.connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await self.wait_closed()
        if self.exists():  # Python 3.13 has removed it
            with contextlib.suppress(OSError):  # a directory that is read-only now keeps it
                self.path.unlink()
