"""The client: one connection, a deadline for every call, and one kind of error."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from npu_agent import __version__
from npu_agent.kube import errors, serviceaccount
from npu_agent.kube.credentials import Credentials, CredentialsError, tls_context
from npu_agent.kube.errors import ApiError, Attempt, Kind
from npu_agent.text import one_line
from npu_agent.threads import DaemonThread

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from aiohttp import ClientResponse, ClientSession

P = TypeVar("P")
T = TypeVar("T")

USER_AGENT = f"npu-agent/{__version__}"

LARGEST_OBJECT = 2 * 2**20
"""Bytes: etcd takes no object of more than 1.5 MiB."""
_LARGEST_ERROR = 64 * 2**10
"""Bytes: a Status is small, and a proxy's page may not be."""
_REREAD = 60.0
"""Seconds until the token is read again. The kubelet replaces it long before it expires, so that a
401 is rare; client-go waits as long."""
_CLOSING = 0.3
"""Seconds: the whole agent has one for its end."""
_APART = 8
"""Calls that may be under way beside the one that has its turn."""
_CLOSED_MEANWHILE = (AssertionError, RuntimeError)
"""What aiohttp raises for a request on a session that was closed under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one object, which is the answer."""

    attempt: Attempt
    method: str
    path: str
    kind: str
    """The kind of object that answers it."""
    accept: str = "application/json"
    content_type: str = "application/json"
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    largest: int = LARGEST_OBJECT
    """Bytes that the answer may have."""


def path(*parts: str) -> str:
    """The path of an object; nothing in a name leaves its place in it."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def part(thing: object, *names: str) -> Mapping[str, Any]:
    """The object at this place of an answer; an empty one if there is none."""
    for name in names:
        thing = thing.get(name) if isinstance(thing, Mapping) else None
    return thing if isinstance(thing, Mapping) else {}


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    reason: str | None
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    whole: bool


class Api:
    """The API server, as the agent uses it.

    Connects at the first call; the credentials are read then, again when the API server no longer
    accepts them, and after each failure to reach it or to have its answer in time. Calls by `ask`
    are made one at a time: there are few, and one connection is enough. What cannot wait for others
    is asked by `ask_apart`.
    """

    def __init__(
        self,
        *,
        kubeconfig: Path | None = None,
        credentials: Credentials | None = None,
        deadline: float = 10.0,
    ) -> None:
        """Does nothing yet.

        Args:
            kubeconfig: where to connect to, and as whom. None: the Pod's service account, else
                $KUBECONFIG, else ~/.kube/config.
            credentials: in place of all of these.
            deadline: seconds that a call may take.
        """
        self._kubeconfig = kubeconfig
        self._given = credentials
        self._deadline = deadline
        self._calling = asyncio.Lock()
        self._apart = asyncio.Semaphore(_APART)
        self._connecting = asyncio.Lock()
        self._session: ClientSession | None = None
        self._renewed: ClientSession | None = None
        """The one that was closed last for the next call to connect again."""
        self._credentials: Credentials | None = None
        self._token_read_at = 0.0
        self._unanswered = False
        """Whether a call was not answered in time since the credentials were read."""

    async def ask(self, request: Request) -> dict[str, Any]:
        """The object that answers a request.

        Raises:
            ApiError: of any kind, and nothing else. TIMEOUT at the deadline, which includes
                connecting and waiting for another call to end.
        """
        try:
            async with asyncio.timeout(self._deadline), self._calling:
                return await self._ask_once_or_twice(request)
        except TimeoutError:
            raise self._silent(request, self._deadline) from None

    async def ask_apart(self, request: Request, *, deadline: float | None = None) -> dict[str, Any]:
        """As `ask`, but beside all other calls: up to eight at the same time.

        Args:
            request: what is asked.
            deadline: seconds that it may take; None: as long as any call.

        Raises:
            ApiError: as `ask`.
        """
        seconds = self._deadline if deadline is None else deadline
        try:
            async with asyncio.timeout(seconds), self._apart:
                return await self._ask_once_or_twice(request)
        except TimeoutError:
            raise self._silent(request, seconds) from None

    async def ask_for(self, request: Request) -> bool:
        """As `ask_apart`; returns whether there is what it asks for.

        Raises:
            ApiError: as `ask`, of any kind but NOT_FOUND.
        """
        try:
            await self.ask_apart(request)
        except ApiError as error:
            if error.kind is Kind.NOT_FOUND:
                return False
            raise
        return True

    @contextlib.asynccontextmanager
    async def watch(
        self, request: Request, *, silence: float
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Opens a watch: its events, with ``type`` and ``object``, until the API server ends it.

        On a connection of its own, which is closed with the context.

        Args:
            request: a GET with ``watch`` and ``timeoutSeconds`` in its query.
            silence: seconds without a byte after which the connection counts as broken.

        Raises:
            ApiError: of any kind, here or by the iterator. Its status is 410 if the resourceVersion
                is too old: list again.
        """
        import aiohttp

        async with contextlib.AsyncExitStack() as stack:
            with self._only_api_errors(request, self._deadline):
                async with asyncio.timeout(self._deadline):
                    session, credentials = await self._connected()
                    # Other answers are read within 5 minutes: aiohttp's default.
                    endless = aiohttp.ClientTimeout(total=None)
                    response = await stack.enter_async_context(
                        _opened(session, credentials, request, timeout=endless)
                    )
                    if response.status != 200:
                        if response.status == 401:
                            await self._renew(session)
                        raise errors.answered(
                            self._named(request.attempt),
                            response.status,
                            response.headers,
                            await response.content.read(_LARGEST_ERROR),
                            response.reason,
                        )
            yield self._events(request, response, silence)

    async def _events(
        self, request: Request, response: ClientResponse, silence: float
    ) -> AsyncIterator[dict[str, Any]]:
        rest = bytearray()
        while True:
            with self._only_api_errors(request, silence):
                async with asyncio.timeout(silence):
                    chunk = await response.content.readany()
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield _event(self._named(request.attempt), bytes(line))
            if len(rest) > request.largest:
                why = f"the API server sent a line of more than {request.largest} bytes"
                raise self._named(request.attempt).failed(Kind.GARBAGE, why)

    @contextlib.contextmanager
    def _only_api_errors(self, request: Request, seconds: float) -> Iterator[None]:
        """Turns what may go wrong with a connection, within so many seconds, into an ApiError."""
        import aiohttp

        try:
            yield
        except CredentialsError as error:
            raise request.attempt.failed(Kind.CREDENTIALS, error.what, error.remedy) from error
        except TimeoutError:
            raise self._silent(request, seconds) from None
        except (aiohttp.ClientError, OSError, ValueError, *_CLOSED_MEANWHILE) as error:
            raise errors.failed(self._named(request.attempt), error) from error

    def _silent(self, request: Request, seconds: float) -> ApiError:
        self._unanswered = True
        attempt = self._named(request.attempt)
        if self._session is None:
            return attempt.failed(
                Kind.TIMEOUT,
                f"nothing was sent within {seconds:g} s, as the credentials are still being loaded",
                "does a file system hang, or a login program of the kubeconfig?",
            )
        return attempt.failed(
            Kind.TIMEOUT,
            f"{attempt.server} has not answered within {seconds:g} s",
            "is it overloaded, or does a firewall or NetworkPolicy drop what is sent to it?",
        )

    @property
    def known_as(self) -> str:
        """Where and as whom, for people; after another call."""
        attempt = self._named(Attempt(doing="", verb="", resource=""))
        return f"{attempt.server} knows us by {attempt.source}"

    async def close(self) -> None:
        """Closes the connection; takes 0.3 s at most. To be called when no call is under way."""
        session, self._session, self._credentials = self._session, None, None
        if session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING):
                    await session.close()

    async def _renew(self, session: ClientSession) -> None:
        """Has the next call connect again, unless another call has seen to that."""
        if session is self._session:
            self._renewed = session
            await self.close()

    async def _ask_once_or_twice(self, request: Request) -> dict[str, Any]:
        try:
            session, answer = await self._exchange(request)
            if answer.status == 401:
                # The token was changed on disk, or the login program has to run again.
                await self._renew(session)
                _, answer = await self._exchange(request)
            return _object(self._named(request.attempt), request, answer)
        except CredentialsError as error:
            raise request.attempt.failed(Kind.CREDENTIALS, error.what, error.remedy) from error
        except OSError as error:  # of connecting: no thread or no file is left
            raise errors.failed(self._named(request.attempt), error) from error

    async def _exchange(self, request: Request) -> tuple[ClientSession, _Answer]:
        again = True
        while True:
            session, credentials = await self._connected()
            import aiohttp

            try:
                return session, await _send(session, credentials, request)
            except (aiohttp.ClientError, OSError, ValueError, *_CLOSED_MEANWHILE) as error:
                # A PATCH can be repeated here; aiohttp repeats a GET. And whatever another call has
                # cut short by closing the connection for the sake of new credentials.
                cut = session is self._renewed
                if again and (cut or (request.method == "PATCH" and _dropped(error))):
                    again = False
                    continue
                failure = errors.failed(self._named(request.attempt), error)
                if failure.kind in (Kind.UNREACHABLE, Kind.CREDENTIALS):
                    # The next call reads address, CA and credentials again.
                    await self._renew(session)
                raise failure from error

    async def _connected(self) -> tuple[ClientSession, Credentials]:
        async with self._connecting:
            return await self._connect()

    async def _connect(self) -> tuple[ClientSession, Credentials]:
        if self._unanswered:
            self._unanswered = False
            with contextlib.suppress(CredentialsError):  # those we have may still be good
                await self._read_again()
        if self._session is None or self._credentials is None:
            found = await self._read()
            await _on_thread(importlib.import_module, "aiohttp")  # 0.2 to 0.4 s the first time
            context = await _on_thread(tls_context, found)
            from aiohttp import ClientSession, TCPConnector

            from npu_agent.kube.resolver import Resolver

            # Without `trust_env`: a line for this server in ~/.netrc, which kubectl does not read
            # either, would break every call.
            self._session = ClientSession(
                connector=TCPConnector(ssl=context, resolver=Resolver()),
                headers={"User-Agent": USER_AGENT},
            )
            self._credentials = found
        elif self._credentials.token_file and time.monotonic() - self._token_read_at >= _REREAD:
            self._token_read_at = time.monotonic()
            # The one we have may still be good; if not, a 401 has all read again, and reports it.
            with contextlib.suppress(CredentialsError):
                token = await serviceaccount.authorization(self._credentials.token_file)
                self._credentials = replace(self._credentials, authorization=token)
        return self._session, self._credentials

    async def _read(self) -> Credentials:
        found = self._given or await _credentials(self._kubeconfig)
        self._token_read_at = time.monotonic()
        return found

    async def _read_again(self) -> None:
        """Has what is on disk used from now on.

        An API server may be slow, so watches and calls under way go on, unless it is elsewhere now.
        """
        session, known = self._session, self._credentials
        if session is None or known is None:
            return
        found = await self._read()
        if replace(found, authorization=None) == replace(known, authorization=None):
            self._credentials = found
        else:
            await self._renew(session)

    def _named(self, attempt: Attempt) -> Attempt:
        """With what is known of the connection."""
        if self._credentials is None:
            return attempt
        found = self._credentials
        return replace(
            attempt,
            server=found.server,
            source=found.source,
            ca=found.ca,
            proxy=found.proxy and found.proxy.rpartition("://")[2].rpartition("@")[2],
        )


async def _credentials(given: Path | None) -> Credentials:
    """By precedence: `given`; in a Pod its service account; $KUBECONFIG; ~/.kube/config.

    Raises:
        CredentialsError: there are none that can be used.
    """
    if given is None and (found := await serviceaccount.load()):
        return found
    return await _on_thread(_kubeconfig, given)


def _kubeconfig(given: Path | None) -> Credentials:
    expand = os.path.expanduser  # Path.expanduser raises for a user without a home
    paths = str(given or os.environ.get("KUBECONFIG") or expand("~/.kube/config"))
    if any(os.path.exists(expand(each)) for each in paths.split(os.pathsep) if each):  # noqa: PTH110
        from npu_agent.kube import kubeconfig

        return kubeconfig.load(paths)
    if given:
        raise CredentialsError(f"the kubeconfig {given} is missing", "give another one")
    raise CredentialsError(
        "no credentials for the API server: there is neither a service account "
        f"({serviceaccount.DIRECTORY / 'token'}, and KUBERNETES_SERVICE_HOST and _PORT in the "
        f"environment) nor a kubeconfig ({paths})",
        "in a Pod mount its token as k8s/daemonset.yaml does, elsewhere set KUBECONFIG, or do "
        "without by labels.output: none and events: false",
    )


async def _on_thread(function: Callable[[P], T], argument: P) -> T:
    """For what takes long or may hang; the call's deadline holds for it too."""
    return await asyncio.get_running_loop().run_in_executor(
        DaemonThread("npu-api"), function, argument
    )


def _opened(
    session: ClientSession, credentials: Credentials, request: Request, **options: Any
) -> AbstractAsyncContextManager[ClientResponse]:
    headers = {"Accept": request.accept, "Content-Type": request.content_type}
    if credentials.authorization:
        headers["Authorization"] = credentials.authorization
    return session.request(
        request.method,
        f"{credentials.server}{request.path}",
        params=request.query,
        headers=headers,
        data=None if request.body is None else json.dumps(request.body),
        proxy=credentials.proxy,
        server_hostname=credentials.server_name,
        # An API server sends none; what another server fails at would be reported as its failure.
        allow_redirects=False,
        **options,
    )


async def _send(session: ClientSession, credentials: Credentials, request: Request) -> _Answer:
    async with _opened(session, credentials, request) as response:
        good = 200 <= response.status < 300
        limit = request.largest if good else _LARGEST_ERROR
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limit:
                break
        return _Answer(
            response.status,
            response.reason,
            response.headers,
            bytes(body[:limit]),
            len(body) <= limit,
        )


def _dropped(error: Exception) -> bool:
    """Whether a connection that had been made was closed before there was an answer."""
    import aiohttp

    return isinstance(
        error,
        aiohttp.ServerDisconnectedError
        | aiohttp.ClientConnectionResetError
        | aiohttp.ClientOSError,
    ) and not isinstance(error, aiohttp.ClientConnectorError)


def _object(attempt: Attempt, request: Request, answer: _Answer) -> dict[str, Any]:
    """The object that an answer holds.

    Raises:
        ApiError: it is a refusal, or holds none of the kind asked for.
    """
    if not 200 <= answer.status < 300:
        raise errors.answered(attempt, answer.status, answer.headers, answer.body, answer.reason)
    found: object = None
    trouble = None
    if not answer.whole:
        trouble = f"more than {request.largest} bytes"
    else:
        try:
            found = json.loads(answer.body)
        except (ValueError, RecursionError):
            beginning = answer.body[:100].decode("utf-8", "replace")
            trouble = f"no JSON, but {one_line(beginning)!r}"
    if isinstance(found, dict) and found.get("kind") == request.kind:
        return found
    kind = found.get("kind") if isinstance(found, dict) else type(found).__name__
    trouble = trouble or f"{one_line(kind)} instead of {request.kind}"
    raise attempt.failed(
        Kind.GARBAGE,
        f"{attempt.server} answered {answer.status} with {trouble}",
        "is that a Kubernetes API server, or a proxy's page?",
        status=answer.status,
    )


def _event(attempt: Attempt, line: bytes) -> dict[str, Any]:
    """One event of a watch.

    Raises:
        ApiError: it says that the watch has failed, or is none.
    """
    found: object = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
    thing = found.get("object") if isinstance(found, dict) else None
    if not (isinstance(found, dict) and isinstance(thing, dict)):
        beginning = line[:100].decode("utf-8", "replace")
        raise attempt.failed(
            Kind.GARBAGE, f"{attempt.server} sent {one_line(beginning)!r} as an event of a watch"
        )
    if found.get("type") == "ERROR":
        code = thing.get("code")
        status = code if isinstance(code, int) else 500
        raise errors.answered(attempt, status, {}, json.dumps(thing).encode(), None)
    return found
