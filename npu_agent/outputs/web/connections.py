"""HTTP connections by aiohttp's low-level server: capped in number, and each with deadlines.

Loaded only when the server starts: aiohttp takes 0.2 s to import.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import LineTooLong

from npu_agent.outputs.web.routes import HttpAnswer, Router, text_answer
from npu_agent.outputs.web.server import PortLimits

if TYPE_CHECKING:
    from npu_agent.outputs.web.authorization import Authorizer

_BACKLOG = 32
"""Connections that wait in the kernel, and that asyncio accepts in one turn of the loop. It is less
than the cap, so that a newcomer's request is read before others push the newcomer out."""
_LINE = 16 * 2**10
"""Bytes of a line of a request's head. Cookies of *localhost* and tokens with many groups have
8 KiB and more."""
_HEADERS = 40
"""Headers of a request at most."""
_UNANSWERED = 48 * 2**10
"""Bytes that a client may send before it is answered: a head, and requests or bodies that follow.
With the cap of connections they bound what a port holds: 3 MiB, which take twice that."""
_TOO_LONG = text_answer(
    f"a line of the request's head is longer than {_LINE // 2**10} KiB. Remove the cookies of this "
    "host in the browser, or ask by its address: http://127.0.0.1:PORT in place of "
    "http://localhost:PORT\n",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
)


class _Handler(web.RequestHandler):
    """A connection: reads no more than `_UNANSWERED` bytes ahead of its answers.

    aiohttp itself reads 32 requests ahead.
    """

    __slots__ = ("unanswered",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unanswered = 0

    def data_received(self, data: bytes) -> None:
        """Drops what is too much: a head then has no end, and an answer ends the connection."""
        room = max(0, _UNANSWERED - self.unanswered)
        self.unanswered += len(data)
        super().data_received(data[:room])

    def answered(self) -> None:
        """Goes on with the next request, unless a part of it was dropped."""
        if self.unanswered > _UNANSWERED:
            self.close()
        self.unanswered = 0

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, LineTooLong):
            response = _response(_TOO_LONG)
            response.force_close()
            return response
        return super().handle_error(request, status, exc, message)


class Connections(web.Server):
    """The open connections of a port; asyncio's factory for the protocol of each new one.

    One more than `PortLimits.connections` ends the oldest.
    """

    def __init__(
        self,
        router: Router,
        authorizer: Authorizer | None,
        limits: PortLimits,
        made_room: Callable[[], None],
    ) -> None:
        """`made_room` is called for each connection that is ended for a newer one."""
        super().__init__(self._handle)
        self._router = router
        self._authorizer = authorizer
        self._limits = limits
        self._made_room = made_room
        self._open: dict[web.RequestHandler, asyncio.Transport] = {}
        """The oldest one is first."""

    def __call__(self) -> web.RequestHandler:
        limits = self._limits
        return _Handler(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,
            logger=_ERRORS,
            # Counted from the connection or the last answer, so that a client that sends a byte
            # now and then gains nothing.
            keepalive_timeout=limits.silence,
            lingering_time=limits.linger,
            max_line_size=_LINE,
            max_field_size=_LINE,
            max_headers=_HEADERS,
            auto_decompress=False,
        )

    @contextlib.asynccontextmanager
    async def serving(
        self, listener: socket.socket, context: ssl.SSLContext | None
    ) -> AsyncIterator[None]:
        limits = self._limits
        # Started apart: who is cancelled in there would leave a socket that listens.
        server = await asyncio.get_running_loop().create_server(
            self,
            sock=listener.dup(),
            backlog=_BACKLOG,
            ssl=context,
            ssl_handshake_timeout=limits.handshake if context else None,
            ssl_shutdown_timeout=limits.linger if context else None,
            start_serving=False,
        )
        try:
            await server.start_serving()
            yield
        finally:
            server.close()
            await asyncio.sleep(0)  # requests that have come are begun before idle ones close
            self.pre_shutdown()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.ending):
                    await self.shutdown(limits.ending / 2)
            for transport in self._open.values():
                _reset(transport)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._open) >= self._limits.connections:
            _reset(self._open.pop(next(iter(self._open))))
            self._made_room()
        self._open[handler] = transport

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        self._open.pop(handler, None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        assert isinstance(handler, _Handler)  # noqa: S101  (for the type checker)
        try:
            async with asyncio.timeout(self._limits.answer):
                response = await self._answer(request)
                # Here and not after the return, where aiohttp would wait without a deadline.
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError as error:
            if request.transport is not None:
                _reset(request.transport)
            raise ConnectionAbortedError("not answered in time, or not read") from error
        handler.answered()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        sent = request.headers
        answer = None

        if self._authorizer is not None:
            answer = await self._authorizer.refusal(
                sent.get("Authorization", ""), request.path, request.remote or ""
            )
        answer = answer or self._router.answer(
            request.method,
            request.path,
            accept=sent.get("Accept", ""),
            encodings=sent.get("Accept-Encoding", ""),
            languages=sent.get("Accept-Language", ""),
        )
        return _response(answer)


def _response(answer: HttpAnswer) -> web.Response:
    headers = {**answer.headers, "Server": "npu-agent"}
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def _reset(transport: asyncio.Transport) -> None:
    """Ends a connection now, with a reset.

    After a plain close the kernel would keep what the client has not read, megabytes, for minutes.
    """
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    transport.abort()


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error that aiohttp logs is not the client's fault."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


_ERRORS = logging.getLogger(f"{__name__}.aiohttp")
_ERRORS.addFilter(_is_ours)
