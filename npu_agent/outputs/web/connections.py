"""HTTP connections by aiohttp's low-level server: capped in number, and each with deadlines.

Loaded only when the server starts: aiohttp takes long to import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence

from aiohttp import web
from aiohttp.http import HttpProcessingError

from npu_agent.outputs.web.authorization import Authorizer
from npu_agent.outputs.web.pages import Answer, Answering

_BACKLOG = 32
"""Connections that wait in the kernel, and that asyncio accepts in one turn of the loop. It is less
than the cap, so that a newcomer's request is read before others push the newcomer out."""
_HANDSHAKE = 5.0
"""Seconds for a client's TLS handshake."""
_ANSWER = 15.0
"""Seconds to answer a request: the page, the API server's word on the client, and the client that
reads it."""
_LINGER = 1.0
"""Seconds in which an unwanted request body is read, so that its client gets to the answer."""
_ENDING = 0.4
"""Seconds to end all connections, whatever the clients do."""
_LINE, _HEADERS = 4096, 40
"""Limits of a request's head: bytes of a line, and number of headers. With the cap they bound the
memory that clients with unfinished heads can take: some 20 MB for each port."""


class Connections(web.Server):
    """The open connections of a port; asyncio's factory for the protocol of each new one."""

    def __init__(
        self,
        answering: Answering,
        authorizer: Authorizer | None,
        *,
        most: int,
        silence: float,
        made_room: Callable[[], None],
    ) -> None:
        """Nothing is open yet.

        Args:
            answering: gives the answers.
            authorizer: asked about each request; None: everybody may have every page.
            most: open connections. One more ends the oldest that has sent no request; if all have,
                the one whose last request is longest ago.
            silence: seconds a client may take to send a request, the first or the next. aiohttp
                counts from the connection or the last answer, so that a client that sends a byte
                now and then gains nothing.
            made_room: called for each connection that is ended for a newer one.
        """
        super().__init__(
            self._handle,
            access_log=None,
            logger=_ERRORS,
            keepalive_timeout=silence,
            lingering_time=_LINGER,
            max_line_size=_LINE,
            max_field_size=_LINE,
            max_headers=_HEADERS,
            auto_decompress=False,
        )
        self._answering = answering
        self._authorizer = authorizer
        self._most = most
        self._made_room = made_room
        self._silent: dict[web.RequestHandler, asyncio.Transport] = {}
        """Connections that have sent no request, the oldest one first."""
        self._asked: dict[web.RequestHandler, asyncio.Transport] = {}
        """The others; the one whose last request is longest ago is first."""

    @contextlib.asynccontextmanager
    async def serving(
        self, sockets: Sequence[socket.socket], context: ssl.SSLContext | None
    ) -> AsyncIterator[None]:
        """Answers on listening sockets, which stay open; at the end closes all connections."""
        loop = asyncio.get_running_loop()
        servers: list[asyncio.Server] = []
        try:
            for each in sockets:
                # Started apart: who is cancelled in there would leave a socket that listens.
                server = await loop.create_server(
                    self,
                    sock=each.dup(),
                    backlog=_BACKLOG,
                    ssl=context,
                    ssl_handshake_timeout=_HANDSHAKE if context else None,
                    ssl_shutdown_timeout=_LINGER if context else None,
                    start_serving=False,
                )
                servers.append(server)
                await server.start_serving()
            yield
        finally:
            for server in servers:
                server.close()
            await asyncio.sleep(0)  # requests that have come are begun before idle ones close
            self.pre_shutdown()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDING):
                    await self.shutdown(_ENDING / 2)
            for transport in (*self._silent.values(), *self._asked.values()):
                _reset(transport)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Called by aiohttp for each new connection."""
        super().connection_made(handler, transport)
        if len(self._silent) + len(self._asked) >= self._most:
            among = self._silent or self._asked
            _reset(among.pop(next(iter(among))))
            self._made_room()
        self._silent[handler] = transport

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Called by aiohttp when one has ended."""
        super().connection_lost(handler, exc)
        self._silent.pop(handler, None)
        self._asked.pop(handler, None)

    async def _answer(self, request: web.BaseRequest) -> Answer:
        if self._authorizer is not None:
            refused = await self._authorizer.refusal(
                request.headers.get("Authorization", ""), request.path, request.remote or ""
            )
            if refused is not None:
                return refused
        return await self._answering.answer(
            request.method,
            request.path,
            accept=request.headers.get("Accept", ""),
            encodings=request.headers.get("Accept-Encoding", ""),
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        for among in (self._silent, self._asked):
            if transport := among.pop(request.protocol, None):
                self._asked[request.protocol] = transport
                break
        try:
            async with asyncio.timeout(_ANSWER):
                answer = await self._answer(request)
                headers = {**answer.headers, "Server": "npu-agent"}
                response = web.Response(status=answer.status, body=answer.body, headers=headers)
                # Here and not after the return, where aiohttp would wait without a deadline.
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError as error:
            if request.transport is not None:
                _reset(request.transport)
            raise ConnectionAbortedError("not answered in time, or not read") from error
        return response


def _reset(transport: asyncio.Transport) -> None:
    """Ends a connection now, with a reset.

    After a plain close the kernel would keep what the client has not read, megabytes, for minutes.
    """
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    transport.abort()


def _ours(record: logging.LogRecord) -> bool:
    """Whether an error that aiohttp logs is not the client's fault."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


_ERRORS = logging.getLogger(f"{__name__}.aiohttp")
_ERRORS.addFilter(_ours)
