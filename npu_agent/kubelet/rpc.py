"""gRPC for the rest of the agent: nothing else imports grpclib (a contract in pyproject.toml).

The messages that betterproto generates are the one exception: their service classes are grpclib's.
Here is also what it lacks: a server that can be closed, and calls without side effects.

All that the agent uses of grpclib's private parts is here, because there is no public way:

- `Server._protocol_factory`, to know the open connections, which `Server` does not close.
- `Channel.__connect__`, to notice a connection that is closed already.
- `grpclib._typing.IServable`, a type, for the type checker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
from collections.abc import Collection, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from grpclib.client import Channel
from grpclib.const import Cardinality, Handler, Status  # noqa: F401 (for those who import this)
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream

from npu_agent import files
from npu_agent.feed import Feed
from npu_agent.logs import logger

if TYPE_CHECKING:
    from grpclib._typing import IServable

log = logger(__name__)

T = TypeVar("T")

UNANSWERED = (OSError, ProtocolError, StreamTerminatedError)
"""Raised by a call without a server, or whose server ended during it."""

_ACCEPTING = 2
"""Turns of the loop from a connection that asyncio accepts to the one where it can be closed."""
_PATH_MAX = 107
"""Bytes in the path of a Unix socket: sun_path holds 108, the last one is NUL (unix(7))."""
DRAINED = 0.2
"""Seconds that streams have to end before their connections are closed."""


async def apart(call: Coroutine[Any, Any, T]) -> T:
    """Awaits a call to a gRPC server in its own task; returns or raises what it does.

    When a connection is lost or a deadline passes, grpclib cancels the task, raises its own error
    there, and never takes the cancellation back (`Task.uncancel`). In the caller's task that would
    stay: under Python 3.11.2 each later `asyncio.timeout` would raise CancelledError instead of
    TimeoutError.
    """
    task = asyncio.create_task(call)
    try:
        # Not `await task`: grpclib may answer a cancellation by an error.
        await asyncio.wait([task])
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message that is encoded already, in the form that grpclib's codec asks for."""

    encoded: bytes = b""

    def SerializeToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        return self.encoded

    @classmethod
    def FromString(cls, encoded: bytes) -> Encoded:  # noqa: N802
        return cls(encoded)


async def ask(path: Path, method: str, request: bytes = b"") -> bytes | None:
    """Makes one call, as `call` does, by a connection of its own to the unix socket `path`."""
    async with UnixChannel(path) as channel:
        return await call(channel, method, request)


async def call(channel: Channel, method: str, request: bytes = b"") -> bytes | None:
    """Makes one call to a server; the caller sets the deadline.

    Args:
        channel: to the server; one that has lost its connection makes another one.
        method: such as ``/v1.PodResourcesLister/List``.
        request: encoded.

    Returns:
        The encoded answer; None if the call ends without one.

    Raises:
        UNANSWERED: no server is there, or it ended during the call.
        GRPCError: the server refuses.
        ValueError: the answer is compressed, or ends early.
    """
    return await apart(_call(channel, method, request))


async def _call(channel: Channel, method: str, request: bytes) -> bytes | None:
    async with channel.request(method, Cardinality.UNARY_UNARY, Encoded, Encoded) as stream:
        await stream.send_message(Encoded(request), end=True)
        try:
            answer = await stream.recv_message()
        except (AssertionError, NotImplementedError) as error:  # grpclib's own
            raise ValueError("the answer is cut off, or compressed") from error
        return None if answer is None else answer.encoded


class UnixChannel(Channel):
    """grpclib's channel, which fails with AttributeError if the server closes what it accepts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path=os.fspath(path))

    async def __connect__(self) -> H2Protocol:
        protocol = await super().__connect__()
        if protocol.connection.is_closing():
            raise ConnectionResetError(errno.ECONNRESET, "it closes the connection")
        return protocol


async def receive_request(stream: Stream[T, Encoded]) -> T:
    """The request of a call that a handler has to answer.

    Raises:
        GRPCError: INVALID_ARGUMENT if there is none, or another message.
    """
    try:
        request = await stream.recv_message()
    except Exception as error:  # betterproto has no error type of its own for broken input
        why = f"the request cannot be decoded: {error}"
        raise GRPCError(Status.INVALID_ARGUMENT, why) from error
    if request is None:
        raise GRPCError(Status.INVALID_ARGUMENT, "the call carries no request")
    return request


@contextlib.contextmanager
def count_call(calls: Feed[int]) -> Iterator[None]:
    """Counts one more call, or stream, while the context is open."""
    calls.publish(calls.value + 1)
    try:
        yield
    finally:
        calls.publish(calls.value - 1)


async def wait_drained(streams: Feed[int]) -> None:
    """Waits briefly until none of this number of streams is open."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAINED):
            await streams.until(lambda number: not number)


def sweep(directory: Path, names: str) -> None:
    """Removes sockets of agents that were killed; `names` is a regular expression for whole names.

    Only for the owner of the node's devices: a socket whose server does not listen yet looks dead.
    """
    with contextlib.suppress(OSError):  # not made yet; read-only now
        for path in sorted(directory.iterdir()):
            if re.fullmatch(names, path.name) and path.is_socket() and not _served(path):
                path.unlink()
                log.info("removed the socket of an agent that has ended", file=path)


def _served(path: Path) -> bool:
    """Whether a process listens there, or that cannot be known."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


class UnixServer(Server):
    """Serves gRPC on a unix socket, knows its connections, and closes them when it ends.

    grpclib's own `close` leaves connections open, so that a client would wait for ever; its
    `wait_closed` hangs from Python 3.12.1 on while a client is connected.
    """

    def __init__(self, handlers: Collection[IServable], path: Path) -> None:
        super().__init__(handlers)
        self.path = path
        self.accepted: Feed[int] = Feed(0)
        self._connections: WeakSet[H2Protocol] = WeakSet()
        self._socket: socket.socket | None = None
        self._identity: tuple[int, int] | None = None

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self._connections.add(protocol)
        self.accepted.publish(self.accepted.value + 1)
        return protocol

    async def listen(self) -> None:
        """Starts to serve on `path`.

        Raises:
            OSError: the socket cannot be made, or exists already, or its path is too long.
        """
        if (length := len(os.fsencode(self.path))) > _PATH_MAX:
            raise OSError(
                f"the path of the socket {self.path} has {length} bytes and Linux takes "
                f"{_PATH_MAX}: choose a shorter socketName, or link the kubelet's directory "
                "to a shorter name on the node (`sudo ln -s DIRECTORY /var/lib/kubelet`) and set "
                "pluginDir to that"
            )
        # Not asyncio's own: that would take over another server's live socket silently, and be left
        # behind by who is cancelled; nor could it stop accepting before it is closed.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(os.fspath(self.path))
            self._identity = files.identity(self.path)
            await self.start(sock=self._socket)
        except BaseException as error:
            self._stop_accepting()
            self._remove()
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, os.fspath(self.path)) from None
            raise

    def exists(self) -> bool:
        """Whether the socket is still where it was made, and still ours."""
        return not files.gone(self.path, self._identity)

    def move(self, path: Path) -> None:
        """Renames the socket; connections stay.

        Raises:
            OSError: it is gone, or cannot be renamed.
        """
        self.path.rename(path)
        self.path = path

    async def shutdown(self) -> None:
        """Ends every connection and removes the socket, also if cancelled; within 0.2 s."""
        self._stop_accepting()
        try:
            for _ in range(_ACCEPTING):  # asyncio leaves these open once its server is closed
                await asyncio.sleep(0)
        finally:
            self.close()
            for protocol in list(self._connections):
                if hasattr(protocol, "connection"):  # not if it was cancelled as it was accepted
                    protocol.connection.close()
            self._remove()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await self.wait_closed()

    def _stop_accepting(self) -> None:
        if self._socket and self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)

    def _remove(self) -> None:
        if self._socket:
            self._socket.close()
        if self._identity and self.exists():
            with contextlib.suppress(OSError):  # a directory that is read-only now keeps it
                self.path.unlink()
