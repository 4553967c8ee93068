"""HTTP connections by aiohttp, bounded: no client can fill memory, or delay a scrape or our exit.

Loaded only when the server starts: aiohttp takes long to import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Sequence

# Not by `aiohttp.web`, which brings applications, routes and file serving along: 1.4 MB.
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler, RequestPayloadError
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response
from aiohttp.web_server import Server

from npu_agent.outputs.web.pages import Pages

_MOST = 64
"""Connections that are kept. Beyond, the one that has been silent for longest is closed: a client
that opens many hurts itself, and a scraper, which sends its request immediately, gets through."""
_SILENCE = 30.0
"""Seconds a client may take to send a request, the first or the next. aiohttp counts from the
connection or the last answer, so that a client that sends a byte now and then gains nothing."""
_TAKE = 10.0
"""Seconds a client may take to read its answer."""
_LINGER = 1.0
"""Seconds in which an unwanted request body is read, so that its client gets to the answer."""
_LINE, _HEADERS = 4096, 40
"""Limits of a request's head: bytes of a line, and number of headers. With `_MOST` they bound the
memory that clients with unfinished heads can take: some 20 MB."""
_BACKLOG = 128
"""Connections that wait to be accepted: asyncio calls listen again, with this number."""


class Connections(Server):
    """The server's open connections; asyncio's factory for the protocol of each new one."""

    def __init__(self, pages: Pages) -> None:
        """Answers with `pages`."""
        super().__init__(
            self._handle,
            access_log=None,
            logger=_ERRORS,
            keepalive_timeout=_SILENCE,
            lingering_time=_LINGER,
            max_line_size=_LINE,
            max_field_size=_LINE,
            max_headers=_HEADERS,
            auto_decompress=False,
        )
        self._pages = pages
        self._open: dict[RequestHandler, asyncio.Transport] = {}
        """Sorted: the one that has been silent for longest comes first."""

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Called by aiohttp for each new connection."""
        super().connection_made(handler, transport)
        # So that "written" means that the kernel has it: a client that does not read falls under
        # the deadline of `_handle`, and nothing keeps an idle connection from closing.
        transport.set_write_buffer_limits(high=0)
        self._open[handler] = transport
        if len(self._open) > _MOST:
            _drop(self._open.pop(next(iter(self._open))))

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Called by aiohttp when one has ended."""
        super().connection_lost(handler, exc)
        self._open.pop(handler, None)

    def abort(self) -> None:
        """Ends every connection, whatever is under way."""
        for transport in self._open.values():
            _drop(transport)

    async def _handle(self, request: BaseRequest) -> Response:
        protocol = request.protocol
        if protocol in self._open:
            self._open[protocol] = self._open.pop(protocol)
        answer = await self._pages.answer(
            request.method,
            request.path,
            accept=request.headers.get("Accept", ""),
            encodings=request.headers.get("Accept-Encoding", ""),
        )
        response = Response(
            status=answer.status,
            body=answer.body,
            headers={**answer.headers, "Server": "npu-agent"},
        )
        # Written here and not after the return, where aiohttp would wait without a deadline.
        try:
            async with asyncio.timeout(_TAKE):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                _drop(request.transport)
        except ConnectionError:
            pass  # the client has gone
        return response


def _drop(transport: asyncio.Transport) -> None:
    """Ends a connection with a reset.

    After a plain close the kernel would keep what the client has not read, megabytes, for minutes.
    """
    transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    transport.abort()


def _ours(record: logging.LogRecord) -> bool:
    """Whether an error that aiohttp logs is not the client's fault."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, RequestPayloadError, ConnectionError))


_ERRORS = logging.getLogger(f"{__name__}.aiohttp")
_ERRORS.addFilter(_ours)


@contextlib.asynccontextmanager
async def serving(
    pages: Pages, sockets: Sequence[socket.socket], ending: float
) -> AsyncIterator[None]:
    """Serves `pages` on listening `sockets`; at the end closes them and all connections.

    `ending` is how many seconds that may take, whatever the clients do.
    """
    connections = Connections(pages)
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(connections, sock=each, backlog=_BACKLOG) for each in sockets
    ]
    try:
        yield
    finally:
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # requests that have come are begun, before idle connections close
        connections.pre_shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ending):
                await connections.shutdown(ending / 2)
        connections.abort()
