"""Accepts connections a few at a time, so that a flood of them leaves the event loop to others.

asyncio's own server accepts whatever comes, and logs each failure to accept.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable

from npu_agent.logs import Seldom, logger

log = logger(__name__)

_BACKLOG = 512
"""Connections that wait in the kernel to be accepted."""
_AT_ONCE = 64
"""Connections that are refused in a row, 1 to 2 ms."""
_ADMITTED = 8
"""An admitted one counts as so many: its request is read before others that were admitted after it
make it leave its place."""
_PAUSE = 0.01
"""Seconds in which the loop is left to others, after so many and after a refusal: in a flood the
loop is woken a hundred times a second, and not for each connection."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RELIEF = 1.0
"""Seconds until it is tried again where files or memory are used up."""


class Listener:
    """One listening socket; `admit` gets each connection."""

    def __init__(
        self, listening: socket.socket, admit: Callable[[socket.socket, str], bool]
    ) -> None:
        """Accepts from now on, until `close`.

        Args:
            listening: is closed by its owner.
            admit: is given a connection and the remote address; returns False if it refuses it.
        """
        self._listening = listening
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._failures = Seldom()
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        self._wait()

    def close(self) -> None:
        """Accepts no more."""
        self._loop.remove_reader(self._listening)
        if self._paused is not None:
            self._paused.cancel()

    def _wait(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening)
        self._paused = self._loop.call_later(seconds, self._wait)

    def _accept(self) -> None:
        refused = False
        left = _AT_ONCE
        while left > 0:
            left -= 1
            try:
                connection, peer = self._listening.accept()
            except ConnectionAbortedError:
                continue  # it has gone again
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if self._failures.due():
                    left_out = self._failures.left_out
                    log.error("no connection can be accepted", reason=error, left_out=left_out)
                self._pause(_RELIEF if error.errno in _EXHAUSTED else _PAUSE)
                return
            if self._admit(connection, str(peer[0])):
                left -= _ADMITTED - 1
            else:
                refused = True
                reset(connection)
                connection.close()
        else:
            refused = True  # there may be more
        if refused:
            self._pause(_PAUSE)


def reset(connection: socket.socket) -> None:
    """Has the connection end with a reset when it is closed.

    After a plain close the kernel would keep what the client has not read, megabytes, for minutes.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
