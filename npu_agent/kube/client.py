"""The API client: a deadline for every call, typed answers, and one kind of error.

Plain aiohttp, as importing any of kubernetes_asyncio takes 37 MB and half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from npu_agent import __version__
from npu_agent.core.state import ApiState
from npu_agent.kube import errors, serviceaccount
from npu_agent.kube.credentials import Credentials, CredentialsError, tls_context
from npu_agent.kube.errors import ApiError, Kind
from npu_agent.kube.request import METADATA, Request
from npu_agent.logs import logger
from npu_agent.text import one_line
from npu_agent.threads import DaemonThread
from npu_agent.typedjson import InvalidJsonError, decode

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from aiohttp import ClientResponse, ClientSession

log = logger(__name__)

T = TypeVar("T")

USER_AGENT = f"npu-agent/{__version__}"

FIELD_MANAGER = "npu-agent"
"""The owner of applied fields, in an object's managedFields."""

_METHODS = {"create": "POST", "apply": "PATCH", "patch": "PATCH", "delete": "DELETE"}
_LARGEST_ERROR = 64 * 2**10
"""Bytes: a Status is small, and a proxy's page may not be."""
_CALLS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds."""

    deadline: float = 10.0
    """Deadline of a call without its own, including connecting and queueing."""
    reread: float = 60.0
    """Until the token is read again, as in client-go: the kubelet replaces it long before it
    expires."""
    close: float = 0.3
    """Longest time to close the connections."""


class WatchEvent(msgspec.Struct, frozen=True):
    """One event of a watch."""

    type: str
    """``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK``; ``ERROR`` is raised."""
    object: dict[str, Any]


class _Object(msgspec.Struct, frozen=True):
    kind: str


@dataclass(frozen=True, slots=True)
class _Login:
    """The credentials that were read last."""

    credentials: Credentials
    tls: ssl.SSLContext
    until: float


class Api:
    """The API server, as the agent uses it.

    Connects at the first call. The first call after one that failed reads the credentials again; no
    call under way is cut for that.

    With the token of a Pod it reads as that Pod's Node, where the API server lets it (KEP-5284,
    constrained impersonation): then the Node authorizer holds every read to that Node. It writes by
    the account's own rights, which our policies hold to less than a kubelet may.
    """

    def __init__(
        self, login: Callable[[], Credentials] | None = None, *, timing: Timing | None = None
    ) -> None:
        """Does nothing yet.

        `login` gives the credentials: it may block, and is called again when they have expired.
        None: the Pod's service account, else `from_kubeconfig`.
        """
        self._log_in = login
        self._timing = timing or Timing()
        self._calls = asyncio.Semaphore(_CALLS)
        self._connecting = asyncio.Lock()
        self._session: ClientSession | None = None
        self._login: _Login | None = None
        self._stale = False
        self.silent: str | None = None
        """Why the last call had no answer at all; None: it had one."""
        self._choosing = asyncio.Lock()
        self._doubted = False
        """Whether `reads` may hold no longer: a read was refused since."""
        self.reads: ApiState | None = None
        """The identity of reads; None: nothing was read yet, or it is not a Pod's token."""

    async def ask(self, request: Request[T], *, deadline: float | None = None) -> T:
        """Returns the object that answers a request in `deadline` seconds; raises only ApiError."""
        seconds = self._timing.deadline if deadline is None else deadline
        with self._only_api_errors(request, seconds):
            async with asyncio.timeout(seconds), self._calls:
                try:
                    return await self._exchange(request)
                except ApiError as error:
                    # Another server's 401, by the proxy, says nothing of our credentials.
                    if error.kind is not Kind.UNAUTHORIZED or not request.answers:
                        raise
                # The token was changed on disk, or the login program has to run again.
                return await self._exchange(request)

    async def exists(self, request: Request[Any]) -> bool:
        """Returns whether the object of the request exists."""
        try:
            await self.ask(request)
        except ApiError as error:
            if error.kind is Kind.NOT_FOUND:
                return False
            raise
        return True

    @contextlib.asynccontextmanager
    async def watch(
        self, request: Request[Any], *, silence: float
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """Opens a watch: its events, until the API server ends it.

        Args:
            request: a watch, with ``timeoutSeconds`` in its query.
            silence: seconds without a byte after which the connection counts as broken.

        Raises:
            ApiError: here or by the iterator. Its status is 410 if the resourceVersion is too old.
        """
        seconds = self._timing.deadline
        async with contextlib.AsyncExitStack() as stack:
            with self._only_api_errors(request, seconds):
                async with asyncio.timeout(seconds):
                    response, _ = await stack.enter_async_context(self._opened(request))
            yield self._events(request, response, silence)

    async def _events(
        self, request: Request[Any], response: ClientResponse, silence: float
    ) -> AsyncIterator[WatchEvent]:
        rest = bytearray()
        while True:
            with self._only_api_errors(request, silence):
                async with asyncio.timeout(silence):
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

    async def close(self) -> None:
        """Closes the connections within 0.3 s; to be called when no call is under way."""
        session, self._session, self._login = self._session, None, None
        if session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.close):
                    await session.close()

    @property
    def _credentials(self) -> Credentials | None:
        return self._login.credentials if self._login else None

    @contextlib.contextmanager
    def _only_api_errors(self, request: Request[Any], seconds: float) -> Iterator[None]:
        """Turns failures of a connection into an ApiError."""
        try:
            yield
        except TimeoutError:
            self._stale = True
            why = f"{errors.server(self._credentials)} has not answered within {seconds:g} s"
            remedy = "check its load, and firewalls and NetworkPolicies on the way"
            if self._login is None:
                why = f"nothing was sent within {seconds:g} s: the credentials are still being read"
                remedy = "check for a file system or a login program of the kubeconfig that hangs"
            found = ApiError(f"cannot {request}: {why}", remedy, kind=Kind.TIMEOUT)
            self.silent = str(found)
            raise found from None
        except _failures() as error:
            self._stale = True
            found = errors.failed(request, error, self._credentials)
            self.silent = str(found)
            raise found from error

    @contextlib.asynccontextmanager
    async def _opened(
        self, request: Request[Any]
    ) -> AsyncIterator[tuple[ClientResponse, Credentials]]:
        """Sends a request; its answer is a 2xx, else an ApiError is raised."""
        session, login = await self._connect()
        node = login.credentials.node if request.reads_of_node else None
        if node and not await self._may_read_as(node, session, login):
            node = None
        async with _sent(session, login, request, node) as response:
            await self._check(request, response, login)
            yield response, login.credentials

    async def _check(self, request: Request[Any], response: ClientResponse, login: _Login) -> None:
        """Raises ApiError unless the answer is a 2xx."""
        status, self.silent = response.status, None
        if 200 <= status < 300:
            return
        # Unless another call has read them again meanwhile.
        refused = status == 401 and bool(request.answers)
        self._stale |= refused and login is self._login
        # Rights were taken or given: the next read finds out which.
        self._doubted |= status == 403 and request.reads_of_node
        body = await _body(response, _LARGEST_ERROR)
        raise errors.answered(request, status, response.headers, body, login.credentials)

    async def _may_read_as(self, node: str, session: ClientSession, login: _Login) -> bool:
        """Whether it reads as this Node, found out by one read of it; raises ApiError."""
        async with self._choosing:
            if self.reads is None or self._doubted:
                probe = Request("get", "Node", dict[str, Any], name=node, metadata_only=True)
                probe = replace(probe, query={"resourceVersion": "0"})
                refusal = ""
                try:
                    async with _sent(session, login, probe, node) as response:
                        await self._check(probe, response, login)
                except ApiError as error:
                    if error.kind is Kind.FORBIDDEN:
                        refusal = error.what
                    elif error.kind is not Kind.NOT_FOUND:  # which a Node may be answered too
                        raise
                self._doubted = False
                self._note(ApiState(as_node=not refusal, refusal=refusal))
            return self.reads is not None and self.reads.as_node

    def _note(self, found: ApiState) -> None:
        before, self.reads = self.reads, found
        if before and found.as_node == before.as_node:
            return
        if found.as_node:
            log.info("reads as its Node (constrained impersonation)")
        else:
            tell = log.warning if before else log.info
            tell(
                "reads with the account's own rights: reading as its Node takes Kubernetes 1.36 "
                "and the component impersonation",
                reason=found.refusal,
            )

    async def _exchange(self, request: Request[T]) -> T:
        async with self._opened(request) as (response, credentials):
            return read_answer(request, await _body(response, request.largest + 1), credentials)

    async def _connect(self) -> tuple[ClientSession, _Login]:
        async with self._connecting:
            if self._stale or (self._login and self._login.until <= time.monotonic()):
                self._login, self._stale = None, False
            if self._login is None:
                found = await (_on_thread(self._log_in) if self._log_in else _credentials())
                tls = await _on_thread(partial(_tls, found))
                until = time.monotonic() + self._timing.reread if found.rotates else math.inf
                self._login = _Login(found, tls, until)
            if self._session is None:
                self._session = _new_session()
            return self._session, self._login


def _tls(credentials: Credentials) -> ssl.SSLContext:
    importlib.import_module("aiohttp")  # here, as that takes 0.2 to 0.4 s the first time
    return tls_context(credentials)


def _new_session() -> ClientSession:
    from aiohttp import ClientSession, ClientTimeout

    # Without `trust_env`: a line for this server in ~/.netrc, which kubectl does not read either,
    # would break every call.
    return ClientSession(
        headers={"User-Agent": USER_AGENT},
        timeout=ClientTimeout(total=None),  # each call and each watch has its own
    )


def _failures() -> tuple[type[Exception], ...]:
    """RuntimeError: aiohttp raises it on a session that was closed."""
    from aiohttp import ClientError

    return (ClientError, OSError, ValueError, RuntimeError)


async def _credentials() -> Credentials:
    """Returns the service account's credentials in a Pod, else those of the kubeconfig."""
    if found := await serviceaccount.load() or await _on_thread(from_kubeconfig):
        return found
    raise CredentialsError(
        "no credentials for the API server: there is neither a service account "
        f"({serviceaccount.DIRECTORY / 'token'}, and KUBERNETES_SERVICE_HOST and _PORT in the "
        f"environment) nor a kubeconfig ({_paths(None)})",
        "in a Pod mount its token as k8s/daemonset.yaml does, elsewhere set KUBECONFIG, or set "
        "labels.output: none, events: false and cordon: false",
    )


def from_kubeconfig(given: Path | None = None, context: str | None = None) -> Credentials | None:
    """Returns a person's credentials: of a file, else $KUBECONFIG, else ~/.kube/config.

    None: there are none.

    Raises:
        CredentialsError: they cannot be used.
    """
    expand, paths = os.path.expanduser, _paths(given)
    if any(os.path.exists(expand(each)) for each in paths.split(os.pathsep) if each):  # noqa: PTH110
        from npu_agent.kube import kubeconfig

        return kubeconfig.load(paths, context)
    if given:
        raise CredentialsError(f"the kubeconfig {given} is missing", "give another one")
    return None


def _paths(given: Path | None) -> str:
    """Separated by colons."""
    default = os.path.expanduser("~/.kube/config")  # noqa: PTH111 (Path's raises without a home)
    return str(given or os.environ.get("KUBECONFIG") or default)


async def _on_thread(function: Callable[[], T]) -> T:
    """Runs a function that may hang, within the call's deadline."""
    return await asyncio.get_running_loop().run_in_executor(DaemonThread("npu-api"), function)


def _sent(
    session: ClientSession, login: _Login, request: Request[Any], node: str | None
) -> AbstractAsyncContextManager[ClientResponse]:
    """`node`: as whom it is asked; None: as the account."""
    credentials = login.credentials
    form = f";as={METADATA};g=meta.k8s.io;v=v1" if request.metadata_only else ""
    headers = {"Accept": f"application/json{form}", "Content-Type": "application/json"}
    query = dict(request.query)
    if request.verb == "apply":
        headers["Content-Type"] = "application/apply-patch+yaml"
        query = {"fieldManager": request.manager or FIELD_MANAGER, "force": "true"}
    elif request.verb == "patch":
        headers["Content-Type"] = "application/merge-patch+json"
    if credentials.authorization:
        headers["Authorization"] = credentials.authorization
    if node:
        headers["Impersonate-User"] = f"system:node:{node}"
    return session.request(
        _METHODS.get(request.verb, "GET"),
        f"{credentials.server}{request.path}",
        params=query,
        headers=[*headers.items(), *credentials.impersonated],
        data=None if request.body is None else json.dumps(request.body),
        proxy=credentials.proxy,
        ssl=login.tls,
        server_hostname=credentials.server_name,
        # An API server sends none; what another server fails at would be reported as its failure.
        allow_redirects=False,
    )


async def _body(response: ClientResponse, most: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= most:
            break
    return bytes(body[:most])


def read_answer(request: Request[T], body: bytes, credentials: Credentials) -> T:
    """Returns the object of an answer; raises ApiError if it is not of the expected kind."""
    if len(body) > request.largest:
        trouble = f"more than {request.largest} bytes"
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
    what = f"cannot {request}: {credentials.server} answered with {trouble}"
    raise ApiError(what, errors.IS_IT_KUBERNETES, kind=Kind.GARBAGE)


def read_event(request: Request[Any], line: bytes, credentials: Credentials | None) -> WatchEvent:
    """Decodes one event of a watch; raises ApiError if the watch failed or it is not an event."""
    try:
        event = decode(line, WatchEvent)
    except InvalidJsonError as error:
        raise errors.unusable(request, error) from error
    if event.type != "ERROR":
        return event
    code = event.object.get("code")
    status = code if isinstance(code, int) else 500
    raise errors.answered(request, status, {}, json.dumps(event.object).encode(), credentials)
