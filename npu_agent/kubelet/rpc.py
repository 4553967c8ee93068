"""What grpclib leaves to be done: a server that can be closed, and calls that leave no mark."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from grpclib.protocol import H2Protocol
from grpclib.server import Server

if TYPE_CHECKING:
    from grpclib._typing import IServable

T = TypeVar("T")


async def apart(call: Coroutine[Any, Any, T]) -> T:
    """Awaits a call to a gRPC server in a task of its own; returns or raises what it does.

    When a connection is lost or a deadline passes, grpclib wakes whoever waits by cancelling the
    task, raises its own error there, and never takes the cancellation back (`Task.uncancel`). In
    the caller's task that would stay for life: under Python 3.11.2 each later `asyncio.timeout`
    that runs out would raise CancelledError instead of TimeoutError, and a TaskGroup could take it
    for its own end.
    """
    return await asyncio.create_task(call)


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
        await self.start(path=str(self.path))
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
