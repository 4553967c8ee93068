"""HTTP connections by aiohttp, bounded: no client can fill memory, or delay a scrape or our exit.

Loaded only when the server starts: aiohttp takes long to import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence

# Not by `aiohttp.web`, which brings applications, routes and file serving along: 1.4 MB.
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler, RequestPayloadError
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response
from aiohttp.web_server import Server

from npu_agent.outputs.web.authorization import Authorizer
from npu_agent.outputs.web.gate import Gate
from npu_agent.outputs.web.listener import Listener, reset
from npu_agent.outputs.web.pages import Answer, Answering
from npu_agent.outputs.web.tls import Certificates

_HANDSHAKE = 5.0
"""Seconds for a client's TLS handshake."""
_TAKE = 10.0
"""Seconds a client may take to read its answer."""
_LINGER = 1.0
"""Seconds in which an unwanted request body is read, so that its client gets to the answer."""
_LINE, _HEADERS = 4096, 40
"""Limits of a request's head: bytes of a line, and number of headers. With `gate`'s bounds they
bound the memory that clients with unfinished heads can take: some 20 MB for each port."""


class Connections(Server):
    """The server's open connections; asyncio's factory for the protocol of each new one."""

    def __init__(
        self,
        answering: Answering,
        gate: Gate,
        certificates: Certificates | None,
        authorizer: Authorizer | None,
    ) -> None:
        """Answers by `answering`, on the connections that `gate` lets in: see `serving`."""
        super().__init__(
            self._handle,
            access_log=None,
            logger=_ERRORS,
            keepalive_timeout=gate.bounds.silence,
            lingering_time=_LINGER,
            max_line_size=_LINE,
            max_field_size=_LINE,
            max_headers=_HEADERS,
            auto_decompress=False,
        )
        self._answering = answering
        self._gate = gate
        self._certificates = certificates
        self._authorizer = authorizer
        self._open: dict[RequestHandler, tuple[str, socket.socket]] = {}
        """The connections that the gate counts, with the remote address. The first one is that
        whose last request, or beginning, is longest ago."""
        self._beginning: set[asyncio.Task[None]] = set()

    def admit(self, connection: socket.socket, address: str) -> bool:
        """Serves a new connection, unless the gate refuses it."""
        if not self._gate.enter(address, self._loop.time(), self._make_room):
            return False
        handler = self()
        self._open[handler] = address, connection
        task = asyncio.create_task(self._begin(handler, connection), name="npu-connection")
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)
        return True

    async def _begin(self, handler: RequestHandler, connection: socket.socket) -> None:
        context = self._certificates.context if self._certificates else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: handler,
                connection,
                ssl=context,
                ssl_handshake_timeout=_HANDSHAKE if context else None,
                ssl_shutdown_timeout=_LINGER if context else None,
            )
        except OSError:  # the client has gone
            connection.close()
            self._left(handler)

    def _make_room(self, address: str | None) -> None:
        """See `Gate.enter`."""
        handler = next(each for each, of in self._open.items() if address in (None, of[0]))
        self._drop(handler)
        self._left(handler)

    def _drop(self, handler: RequestHandler) -> None:
        """Ends a connection with a reset, whatever its client has not read."""
        _, connection = self._open[handler]
        reset(connection)
        if handler.transport is not None:
            handler.transport.abort()
        else:  # `_begin` comes to its end
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _left(self, handler: RequestHandler) -> None:
        if of := self._open.pop(handler, None):
            self._gate.leave(of[0])

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Called by aiohttp for each new connection."""
        super().connection_made(handler, transport)
        # So that "written" means that the kernel has it: a client that does not read falls under
        # the deadline of `_handle`, and nothing keeps an idle connection from closing.
        # Not 0: over TLS, asyncio pauses the writer where the buffer has as many bytes as `high` or
        # more, and so also with an empty one.
        transport.set_write_buffer_limits(high=1)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Called by aiohttp when one has ended."""
        super().connection_lost(handler, exc)
        self._left(handler)

    def abort(self) -> None:
        """Ends every connection, whatever is under way."""
        for handler in self._open:
            self._drop(handler)

    async def _answer(self, request: BaseRequest) -> Answer:
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

    async def _handle(self, request: BaseRequest) -> Response:
        if of := self._open.pop(request.protocol, None):
            self._open[request.protocol] = of
        answer = await self._answer(request)
        response = Response(
            status=answer.status,
            body=answer.body,
            headers={**answer.headers, "Server": "npu-agent"},
        )
        if self._certificates is not None and request.transport is not None:
            # Under another certificate, or other authorities of clients, than those in force now.
            began_with = request.transport.get_extra_info("sslcontext")
            if began_with is not self._certificates.context:
                response.force_close()
        # Written here and not after the return, where aiohttp would wait without a deadline.
        try:
            async with asyncio.timeout(_TAKE):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.protocol in self._open:
                self._drop(request.protocol)
        except ConnectionError:
            pass  # the client has gone
        return response


def _ours(record: logging.LogRecord) -> bool:
    """Whether an error that aiohttp logs is not the client's fault."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, RequestPayloadError, ConnectionError))


_ERRORS = logging.getLogger(f"{__name__}.aiohttp")
_ERRORS.addFilter(_ours)


@contextlib.asynccontextmanager
async def serving(
    answering: Answering,
    sockets: Sequence[socket.socket],
    gate: Gate,
    *,
    certificates: Certificates | None,
    authorizer: Authorizer | None,
    ending: float,
) -> AsyncIterator[None]:
    """Answers on listening `sockets`; at the end accepts no more, and closes all connections.

    Args:
        answering: gives the answers.
        sockets: are closed by their owner.
        gate: of these sockets together.
        certificates: with a good one; None: without TLS.
        authorizer: asked about each request; None: everybody may have every page.
        ending: how many seconds the end may take, whatever the clients do.
    """
    connections = Connections(answering, gate, certificates, authorizer)
    listeners = [Listener(each, connections.admit) for each in sockets]
    try:
        yield
    finally:
        for listener in listeners:
            listener.close()
        await asyncio.sleep(0)  # requests that have come are begun, before idle connections close
        connections.pre_shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ending):
                await connections.shutdown(ending / 2)
        connections.abort()
