"""The client: one connection, a deadline for every call, and one kind of error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_agent import __version__
from npu_agent.kube import credentials, errors, lean
from npu_agent.kube.credentials import CredentialsError
from npu_agent.kube.errors import ApiError, Attempt, Kind
from npu_agent.kube.node import FIELD_MANAGER, NodeMeta, node_meta

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes_asyncio.client.api_client import ApiClient
    from kubernetes_asyncio.client.configuration import Configuration

USER_AGENT = f"npu-agent/{__version__}"

_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_LARGEST = 2 * 2**20
"""Bytes: etcd takes no object of more than 1.5 MiB."""
_LARGEST_ERROR = 64 * 2**10
"""Bytes: a Status is small, and a proxy's page may not be."""
_CLOSING = 1.0
"""Seconds."""
_CLOSED_MEANWHILE = (AssertionError, RuntimeError)
"""What aiohttp raises for a request on a session that was closed under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    attempt: Attempt
    method: str
    path: str
    names: Mapping[str, str]
    """What goes into the path."""
    kind: str
    """The kind of object that answers it."""
    accept: str = "application/json"
    content_type: str = "application/json"
    query: tuple[tuple[str, str], ...] = ()
    body: Mapping[str, Any] | None = None


def _get_node(name: str) -> _Request:
    """For the whole Node; resourceVersion 0 is the API server's cache."""
    return _Request(
        attempt=Attempt(doing=f"get Node {name}", verb="get", resource="nodes"),
        method="GET",
        path="/api/v1/nodes/{name}",
        names={"name": name},
        kind="Node",
        query=(("resourceVersion", "0"),),
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    reason: str | None
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    whole: bool
    method: str
    """Of the last request: a redirect may have made it another one."""


class Api:
    """The API server, as the agent uses it.

    Connects at the first call; the credentials are read then, again when the API server no longer
    accepts them, and after each failure to reach it. Calls are made one at a time: there are few,
    and one connection is enough.

    Every call has the deadline, which includes connecting and waiting for another call to end, and
    raises ApiError and nothing else.
    """

    def __init__(self, *, kubeconfig: Path | None = None, deadline: float = 10.0) -> None:
        """Does nothing yet.

        Args:
            kubeconfig: where to connect to, and as whom. None: the Pod's service account, else
                $KUBECONFIG, else ~/.kube/config.
            deadline: seconds that a call may take.
        """
        self._kubeconfig = kubeconfig
        self._deadline = deadline
        self._calling = asyncio.Lock()
        self._client: ApiClient | None = None
        self._source = "no credentials"

    async def node(self, name: str) -> NodeMeta:
        """The Node's metadata, from the API server's cache: it may be a moment old.

        Raises:
            ApiError: of any kind.
        """
        request = _get_node(name)
        return await self._node(
            replace(request, kind="PartialObjectMetadata", accept=_METADATA_ONLY)
        )

    async def apply_labels(self, node: NodeMeta, labels: Mapping[str, str]) -> NodeMeta:
        """Makes `labels` what the agent owns on this Node; returns the Node after that.

        Keys that it applied before and that are not among them are removed; a key that somebody
        else set is taken over; all other keys stay as they are. An apply that changes nothing
        writes nothing. No Node is made: the uid has to be that of a Node that is there.

        Raises:
            ApiError: of any kind; CONFLICT if the Node was deleted or made anew.
        """
        metadata: dict[str, Any] = {"name": node.name, "uid": node.uid}
        if labels:  # an empty object would be owned too, and would stay behind
            metadata["labels"] = dict(labels)
        return await self._node(
            _Request(
                attempt=Attempt(
                    doing=f"apply labels to Node {node.name}", verb="patch", resource="nodes"
                ),
                method="PATCH",
                path="/api/v1/nodes/{name}",
                names={"name": node.name},
                kind="PartialObjectMetadata",
                accept=_METADATA_ONLY,
                content_type="application/apply-patch+yaml",
                query=(("fieldManager", FIELD_MANAGER), ("force", "true")),
                body={"apiVersion": "v1", "kind": "Node", "metadata": metadata},
            )
        )

    async def create_event(self, namespace: str, event: dict[str, Any]) -> str:
        """Creates a core/v1 Event; returns its name, which the API server makes of generateName.

        Raises:
            ApiError: of any kind.
        """
        attempt = Attempt(
            doing=f"create an Event in namespace {namespace}", verb="create", resource="events"
        )
        request = _Request(
            attempt=attempt,
            method="POST",
            path="/api/v1/namespaces/{namespace}/events",
            names={"namespace": namespace},
            kind="Event",
            query=(("fieldManager", FIELD_MANAGER),),
            body=event,
        )
        metadata = (await self._ask(request)).get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if not isinstance(name, str) or not name:
            raise attempt.failed(Kind.GARBAGE, "the API server answered an Event without a name")
        return name

    async def patch_event(self, namespace: str, name: str, patch: dict[str, Any]) -> None:
        """Changes a core/v1 Event by a JSON merge patch.

        Raises:
            ApiError: of any kind; NOT_FOUND if it has expired, which Events do after an hour.
        """
        await self._ask(
            _Request(
                attempt=Attempt(
                    doing=f"patch Event {namespace}/{name}", verb="patch", resource="events"
                ),
                method="PATCH",
                path="/api/v1/namespaces/{namespace}/events/{name}",
                names={"namespace": namespace, "name": name},
                kind="Event",
                content_type="application/merge-patch+json",
                query=(("fieldManager", FIELD_MANAGER),),
                body=patch,
            )
        )

    async def may(self, verb: str, resource: str, *, namespace: str = "", name: str = "") -> bool:
        """Whether these credentials have this right on a resource of the core group.

        Every authenticated user may ask (ClusterRole system:basic-user).

        Raises:
            ApiError: of any kind.
        """
        attributes = {"verb": verb, "group": "", "resource": resource}
        attributes |= {"namespace": namespace} if namespace else {}
        attributes |= {"name": name} if name else {}
        answer = await self._ask(
            _Request(
                attempt=Attempt(
                    doing="ask what we are allowed",
                    verb="create",
                    resource="selfsubjectaccessreviews",
                ),
                method="POST",
                path="/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                names={},
                kind="SelfSubjectAccessReview",
                body={
                    "apiVersion": "authorization.k8s.io/v1",
                    "kind": "SelfSubjectAccessReview",
                    "spec": {"resourceAttributes": attributes},
                },
            )
        )
        status = answer.get("status")
        return isinstance(status, Mapping) and status.get("allowed") is True

    async def whole_node(self, name: str) -> dict[str, Any]:
        """The Node with its status, from the API server's cache.

        Raises:
            ApiError: of any kind.
        """
        return await self._ask(_get_node(name))

    @property
    def known_as(self) -> str:
        """Where and as whom, for people; after another call."""
        attempt = self._named(Attempt(doing="", verb="", resource=""))
        return f"{attempt.server} knows us by {attempt.source}"

    async def close(self) -> None:
        """Closes the connection; takes a second at most. To be called when no call is under way."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING):
                    await client.close()

    async def _node(self, request: _Request) -> NodeMeta:
        answer = await self._ask(request)
        try:
            return node_meta(answer)
        except ValueError as error:
            raise request.attempt.failed(
                Kind.GARBAGE, f"the API server's answer is of no use: {error}"
            ) from error

    async def _ask(self, request: _Request) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._deadline), self._calling:
                return await self._ask_once_or_twice(request)
        except TimeoutError:
            attempt = self._named(request.attempt)
            raise attempt.failed(
                Kind.TIMEOUT,
                f"{attempt.server} has not answered within {self._deadline:g} s: is it overloaded, "
                "or does a firewall or NetworkPolicy drop what is sent to it?",
            ) from None

    async def _ask_once_or_twice(self, request: _Request) -> dict[str, Any]:
        try:
            answer = await self._exchange(request)
            if answer.status == 401:
                # The token was changed on disk, or the login program has to run again.
                await self.close()
                answer = await self._exchange(request)
            return _object(self._named(request.attempt), request, answer)
        except CredentialsError as error:
            await self.close()
            raise request.attempt.failed(Kind.CREDENTIALS, str(error)) from error
        except ApiError as error:
            if error.kind in (Kind.UNREACHABLE, Kind.CREDENTIALS):
                await self.close()  # the next call reads address, CA and credentials again
            raise

    async def _exchange(self, request: _Request) -> _Answer:
        client = await self._connected()
        import aiohttp

        again = request.method == "PATCH"  # which can be repeated here; aiohttp repeats a GET
        while True:
            try:
                return await _send(client, request)
            except (aiohttp.ClientError, OSError, ValueError, *_CLOSED_MEANWHILE) as error:
                if not (again and _dropped(error)):
                    raise errors.failed(self._named(request.attempt), error) from error
                again = False

    async def _connected(self) -> ApiClient:
        if self._client is None:
            # Brings aiohttp, which takes longer than all the rest.
            module = await asyncio.to_thread(lean.module, "kubernetes_asyncio.client.api_client")
            import aiohttp

            made, self._source = await credentials.configuration(self._kubeconfig)
            try:
                client, context = await asyncio.to_thread(_prepared, module.ApiClient, made)
            except OSError as error:
                raise credentials.certificates_error(made, self._source, error) from error
            # Of its own, since the library's would take proxies and ~/.netrc from the environment.
            # `proxy_for` has chosen the proxy; and a line for this server in ~/.netrc, which
            # kubectl does not read either, would break every call.
            client.rest_client.pool_manager = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context), trust_env=False
            )
            client.user_agent = USER_AGENT
            self._client = client
        return self._client

    def _named(self, attempt: Attempt) -> Attempt:
        """With what is known of the connection."""
        if self._client is None:
            return attempt
        made = self._client.configuration
        return replace(
            attempt,
            server=str(made.host),
            source=self._source,
            ca=made.ssl_ca_cert,
            proxy=made.proxy and made.proxy.rpartition("://")[2].rpartition("@")[2],
        )


def _prepared(api_client: type[ApiClient], made: Configuration) -> tuple[ApiClient, ssl.SSLContext]:
    """A client without a session, and how it is to speak TLS. To be called on a thread.

    Reading the system's certificate authorities takes up to a third of a second. The library does
    that when it makes a client, and wants a running loop for it.

    Raises:
        OSError: a file with a certificate or key is missing or damaged.
    """

    async def without_session() -> ApiClient:
        client = api_client(made)
        await client.rest_client.pool_manager.close()
        return client

    context = ssl.create_default_context(cafile=made.ssl_ca_cert)
    if made.cert_file:
        context.load_cert_chain(made.cert_file, made.key_file)
    if not made.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    # CAs that lack an extension which Go does not ask for are common, and Python 3.13 refuses them.
    # The chain, the host name and the dates are checked all the same.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return asyncio.run(without_session()), context


async def _send(client: ApiClient, request: _Request) -> _Answer:
    response: ClientResponse = await client.call_api(
        request.path,
        request.method,
        path_params=dict(request.names),
        query_params=list(request.query),
        header_params={"Accept": request.accept, "Content-Type": request.content_type},
        body=request.body,
        auth_settings=["BearerToken"],
        # Not read and not decoded there: without a bound, and with errors of three kinds.
        _preload_content=False,
    )
    async with response:
        good = 200 <= response.status < 300
        limit = _LARGEST if good else _LARGEST_ERROR
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
            response.method,
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


def _object(attempt: Attempt, request: _Request, answer: _Answer) -> dict[str, Any]:
    """The object that an answer holds.

    Raises:
        ApiError: it says no, or holds none of the kind asked for.
    """
    if not 200 <= answer.status < 300:
        raise errors.answered(attempt, answer.status, answer.headers, answer.body, answer.reason)
    trouble = None
    found: object = None
    if answer.method != request.method:
        trouble = f"a redirect has made a {answer.method} of the {request.method}"
    elif not answer.whole:
        trouble = f"more than {_LARGEST} bytes"
    else:
        try:
            found = json.loads(answer.body)
        except (ValueError, RecursionError):
            trouble = (
                f"no JSON, but {errors.one_line(answer.body[:100].decode('utf-8', 'replace'))!r}"
            )
    if isinstance(found, dict) and found.get("kind") == request.kind:
        return found
    kind = found.get("kind") if isinstance(found, dict) else type(found).__name__
    trouble = trouble or f"{errors.one_line(kind)} instead of {request.kind}"
    raise attempt.failed(
        Kind.GARBAGE,
        f"{attempt.server} answered {answer.status} with {trouble}: is that a Kubernetes API "
        "server, or a proxy's page?",
        status=answer.status,
    )
