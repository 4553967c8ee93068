"""The API client: kubernetes_asyncio's, with deadlines, bounded typed answers and one error."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import msgspec

from npu_agent import __version__
from npu_agent.core.state import ApiState
from npu_agent.kube import credentials, errors
from npu_agent.kube.credentials import Credentials
from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.kube.objects import Versioned
from npu_agent.kube.request import METADATA, Request
from npu_agent.logs import logger
from npu_agent.text import one_line
from npu_agent.threads import DaemonThread
from npu_agent.typedjson import InvalidJsonError, decode

if TYPE_CHECKING:
    from aiohttp import ClientResponse

log = logger(__name__)

T = TypeVar("T")

USER_AGENT = f"npu-agent/{__version__}"

FIELD_MANAGER = "npu-agent"
"""The owner of applied fields, in an object's managedFields."""

_METHODS = {"create": "POST", "apply": "PATCH", "patch": "PATCH", "delete": "DELETE"}
_LARGEST_ERROR = 64 * 2**10
"""Bytes: a Status is small, and a proxy's page may not be."""
_CALLS = 8
SILENCE = 90.0
"""Seconds: the API server sends a bookmark each minute (k8s.io/apiserver, cacher.go,
defaultBookmarkFrequency), so one that is half a minute late is a connection that is broken."""
KEEP_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 25,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 6,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}
"""Of a watch's socket: the kernel notices within 45 s that the server has vanished without a word.
A server's own keep-alives count as words."""
_CLOSE = 0.3
_DEADLINE = 10.0


class WatchEvent(NamedTuple):
    """A change of a watched object."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    version: str
    object: Any
    """As the answer of the watch's request; None: a bookmark has only a version."""


class _Event(msgspec.Struct, frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Code(msgspec.Struct, frozen=True):
    code: int = 500


class _Object(msgspec.Struct, frozen=True):
    kind: str


class _Connection:
    """The library's client with one set of credentials; a stale one ends with its last call."""

    def __init__(self, credentials: Credentials) -> None:
        """Raises OSError: a file with a certificate or key is missing or damaged."""
        from aiohttp import ClientSession, DummyCookieJar, UnixConnector
        from kubernetes_asyncio.client import ApiClient

        self.credentials = credentials
        self.until = time.monotonic() + credentials.good_for
        """When the next call should have another one: now, if the credentials may have changed."""
        self.calls = 0
        self._client = ApiClient(credentials.configuration)
        self._client.user_agent = USER_AGENT
        rest: Any = self._client.rest_client
        connector = rest.pool_manager.connector
        if credentials.socket:
            connector = UnixConnector(str(credentials.socket))
        # The library's own session has `trust_env`: with a line for this server in ~/.netrc, which
        # kubectl does not read either, every call would fail.
        rest.pool_manager.detach()
        # A page that is read through `kubectl proxy` is another's: its cookies would go to all.
        session = ClientSession(connector=connector, cookie_jar=DummyCookieJar())
        # The library follows redirects, with these credentials, to wherever an answer says.
        rest.pool_manager = SimpleNamespace(
            request=partial(session.request, allow_redirects=False), close=session.close
        )

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keeps it open for a call, with what the call asks before."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            if self.stale and not self.calls:
                await self.close()

    @property
    def stale(self) -> bool:
        return time.monotonic() >= self.until

    async def close(self) -> None:
        """Closes it, in 0.3 s; a call under way fails."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE):
                await self._client.close()

    async def send(self, request: Request[Any], node: str | None) -> ClientResponse:
        """Sends a request; returns its answer. `node`: as whom; None: as the account."""
        form = f";as={METADATA};g=meta.k8s.io;v=v1" if request.metadata_only else ""
        headers = {"Accept": f"application/json{form}", "Content-Type": "application/json"}
        query = dict(request.query)
        if request.verb == "apply":
            headers["Content-Type"] = "application/apply-patch+yaml"
            query = {"fieldManager": request.manager or FIELD_MANAGER, "force": "true"}
        elif request.verb == "patch":
            headers["Content-Type"] = "application/merge-patch+json"
        if node:
            headers["Impersonate-User"] = f"system:node:{node}"
        response: ClientResponse = await self._client.call_api(
            request.path,
            _METHODS.get(request.verb, "GET"),
            query_params=query,
            header_params=headers,
            body=request.body,
            auth_settings=["BearerToken"],
            _preload_content=False,
        )
        return response


class Api:
    """The API server, as the agent uses it.

    Connects at the first call. The first call after one that failed reads the credentials again; no
    call under way is cut for that.

    With the token of a Pod it reads as that Pod's Node, where the API server lets it (KEP-5284,
    constrained impersonation): then the Node authorizer holds every read to that Node. It writes by
    the account's own rights, which our policies hold to less than a kubelet may.
    """

    def __init__(
        self,
        login: Callable[[], Credentials] | None = None,
        *,
        after: Callable[[], Awaitable[None]] | None = None,
        deadline: float = _DEADLINE,
    ) -> None:
        """Does nothing yet.

        Args:
            login: gives the credentials, again after each failure; may block. None: the Pod's
                service account, else the kubeconfig.
            after: awaited before the library is loaded, which delays the loop here and there.
            deadline: seconds for a call without its own, with connecting and queueing.
        """
        self._log_in = login or credentials.load
        # Files may hang, and the library takes 0.3 s to import the first time.
        self._thread = DaemonThread()
        self._after = after
        self._deadline = deadline
        self._calls = asyncio.Semaphore(_CALLS)
        self._connecting = asyncio.Lock()
        self._connection: _Connection | None = None
        self.silent: str | None = None
        """Why the last call had no answer at all; None: it had one."""
        self._choosing = asyncio.Lock()
        self._doubted = False
        """Whether `reads` may hold no longer: a read was refused since."""
        self.reads: ApiState | None = None
        """The identity of reads; None: nothing was read yet, or it is not a Pod's token."""

    async def ask(self, request: Request[T], *, deadline: float | None = None) -> T:
        """Returns the object that answers a request in `deadline` seconds; raises only ApiError."""
        seconds = self._deadline if deadline is None else deadline
        with self._only_api_errors(request, seconds):
            async with asyncio.timeout(seconds), self._calls:
                try:
                    return await self._exchange(request)
                except ApiError as error:
                    # Another server's 401, by the proxy, says nothing of our credentials.
                    if error.kind is not ErrorKind.UNAUTHORIZED or not request.answers:
                        raise
                return await self._exchange(request)

    async def exists(self, request: Request[Any]) -> bool:
        """Returns whether the object of the request exists."""
        try:
            await self.ask(request)
        except ApiError as error:
            if error.kind is ErrorKind.NOT_FOUND:
                return False
            raise
        return True

    @contextlib.asynccontextmanager
    async def watch(
        self, request: Request[Any], version: str, seconds: float
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """Opens a watch: the events after a version, until the API server ends it.

        Args:
            request: a watch; its query says which objects.
            version: a resourceVersion.
            seconds: after which the API server ends it.

        Raises:
            ApiError: here or by the iterator. Its status is 410 if the resourceVersion is too old.
        """
        deadline = self._deadline
        query = {
            **request.query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(round(seconds)),
        }
        request = replace(request, query=query)
        async with contextlib.AsyncExitStack() as stack:
            with self._only_api_errors(request, deadline):
                async with asyncio.timeout(deadline):
                    response = await stack.enter_async_context(self._opened(request))
                _keep_alive(response)
            yield self._events(request, response)

    async def _events(
        self, request: Request[Any], response: ClientResponse
    ) -> AsyncIterator[WatchEvent]:
        rest = bytearray()
        while True:
            with self._only_api_errors(request, SILENCE):
                async with asyncio.timeout(SILENCE):
                    chunk = await response.content.readany()
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield read_event(request, bytes(line), self._credentials)
            if len(rest) > request.largest:
                too_long = ValueError(f"a line of more than {request.largest} bytes")
                raise errors.unusable(request, too_long)

    @property
    def known_as(self) -> str:
        """Describes server and identity for people; valid after another call."""
        source = self._credentials.source if self._credentials else "no credentials"
        return f"{errors.server(self._credentials)} accepts {source}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections within 0.3 s; to be called when no call is under way."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            await connection.close()

    @property
    def _credentials(self) -> Credentials | None:
        return self._connection.credentials if self._connection else None

    @contextlib.contextmanager
    def _only_api_errors(self, request: Request[Any], seconds: float) -> Iterator[None]:
        """Turns failures of a connection into an ApiError."""
        try:
            yield
        except ApiError:  # before `_failures`, which would load the library here
            raise
        except TimeoutError:
            why = f"{errors.server(self._credentials)} has not answered within {seconds:g} s"
            remedy = "check its load, and firewalls and NetworkPolicies on the way"
            if self._connection is None:
                why = f"nothing was sent within {seconds:g} s: the credentials are still being read"
                remedy = "check for a file system or a login program of the kubeconfig that hangs"
            raise self._failed(
                ApiError(f"cannot {request}: {why}", remedy, kind=ErrorKind.TIMEOUT)
            ) from None
        except _failures() as error:
            raise self._failed(errors.failed(request, error, self._credentials)) from error

    def _failed(self, error: ApiError) -> ApiError:
        """The next call reads the credentials again."""
        if self._connection:
            self._connection.until = -math.inf
        self.silent = str(error)
        return error

    @contextlib.asynccontextmanager
    async def _opened(self, request: Request[Any]) -> AsyncIterator[ClientResponse]:
        """Sends a request; its answer is a 2xx, else an ApiError is raised."""
        connection = await self._connect()
        async with connection.in_use():
            of_node = request.reads_of_node or request.as_node
            node = connection.credentials.node if of_node else None
            if node and not await self._may_read_as(node, connection):
                node = None
            if request.as_node and node is None:
                raise errors.not_as_node(request, self.reads)
            async with await connection.send(request, node) as response:
                await self._check(request, response, connection)
                yield response

    async def _check(
        self, request: Request[Any], response: ClientResponse, connection: _Connection
    ) -> None:
        """Raises ApiError unless the answer is a 2xx."""
        status = response.status
        self.silent = None
        if 200 <= status < 300:
            return
        if status == 401 and request.answers:
            connection.until = -math.inf
        # Rights were taken or given: the next read finds out which.
        self._doubted |= status == 403 and request.reads_of_node
        body = await _body(response, _LARGEST_ERROR)
        raise errors.answered(request, status, response.headers, body, connection.credentials)

    async def _may_read_as(self, node: str, connection: _Connection) -> bool:
        """Whether it reads as this Node, found out by one read of it; raises ApiError."""
        async with self._choosing:
            if self.reads is None or self._doubted:
                probe = Request("get", "Node", dict[str, Any], name=node, metadata_only=True)
                probe = replace(probe, query={"resourceVersion": "0"})
                refusal = ""
                try:
                    async with await connection.send(probe, node) as response:
                        await self._check(probe, response, connection)
                except ApiError as error:
                    if error.kind is ErrorKind.FORBIDDEN:
                        refusal = error.what
                    elif error.kind is not ErrorKind.NOT_FOUND:  # which a Node may be answered too
                        raise
                self._doubted = False
                self._set_reads(ApiState(as_node=not refusal, refusal=refusal))
            return self.reads is not None and self.reads.as_node

    def _set_reads(self, state: ApiState) -> None:
        before = self.reads
        self.reads = state
        if before and state.as_node == before.as_node:
            return
        if state.as_node:
            log.info("reads as its Node (constrained impersonation)")
        else:
            tell = log.warning if before else log.info
            tell(
                "reads with the account's own rights: reading as its Node takes Kubernetes 1.36 "
                "and the component impersonation",
                reason=state.refusal,
            )

    async def _exchange(self, request: Request[T]) -> T:
        async with self._opened(request) as response:
            body = await _body(response, request.largest + 1)
            return read_answer(request, body, self._credentials)

    async def _connect(self) -> _Connection:
        async with self._connecting:
            if self._connection and not self._connection.stale:
                return self._connection

            before = self._connection
            self._connection = None
            if before and not before.calls:
                await before.close()

            after = self._after
            self._after = None
            if after:
                await after()
            loop = asyncio.get_running_loop()
            credentials = await loop.run_in_executor(self._thread, self._log_in)
            try:
                self._connection = _Connection(credentials)
            except OSError as error:
                raise errors.bad_certificate(error, credentials) from error
            return self._connection


def _failures() -> tuple[type[Exception], ...]:
    """RuntimeError: aiohttp raises it on a session that was closed."""
    from aiohttp import ClientError

    return (ClientError, OSError, ValueError, RuntimeError)


def _keep_alive(response: ClientResponse) -> None:
    """Has the kernel notice that the other end has vanished; raises OSError if it has closed."""
    transport = response.connection and response.connection.transport
    peer = transport and transport.get_extra_info("socket")
    if peer and peer.family != socket.AF_UNIX:  # of `kubectl proxy`
        for (level, option), value in KEEP_ALIVE.items():
            peer.setsockopt(level, option, value)


async def _body(response: ClientResponse, most: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= most:
            break
    del body[most:]  # in place: a list may be large, and a copy as well
    return bytes(body)


def read_answer(request: Request[T], body: bytes, credentials: Credentials | None) -> T:
    """Returns the object of an answer; raises ApiError if it is not of the expected kind."""
    remedy = errors.IS_IT_KUBERNETES
    if len(body) > request.largest:
        trouble = f"more than {request.largest} bytes"
        remedy = errors.TOO_LONG.get(request.kind, remedy)
    else:
        try:
            kind = request.answers and decode(body, _Object).kind
        except InvalidJsonError:
            trouble = f"no object, but {one_line(body[:100].decode('utf-8', 'replace'))!r}"
        else:
            if kind == request.answers:
                try:
                    return decode(body, request.answer)
                except InvalidJsonError as error:
                    raise errors.unusable(request, error) from error
            trouble = f"{one_line(kind)} instead of {request.answers}"
    what = f"cannot {request}: {errors.server(credentials)} answered with {trouble}"
    raise ApiError(what, remedy, kind=ErrorKind.GARBAGE)


def read_event(request: Request[Any], line: bytes, credentials: Credentials | None) -> WatchEvent:
    """Decodes one event of a watch; raises ApiError if the watch failed or it is not an event."""
    try:
        event = decode(line, _Event)
        if event.type != "ERROR":
            version = decode(event.object, Versioned).metadata.resource_version
            is_bookmark = event.type == "BOOKMARK"
            value = None if is_bookmark else decode(event.object, request.answer)
            return WatchEvent(event.type, version, value)
        status = decode(event.object, _Code).code
    except InvalidJsonError as error:
        raise errors.unusable(request, error) from error
    raise errors.answered(request, status, {}, bytes(event.object), credentials)
