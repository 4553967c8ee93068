"""Reads a cluster: lists, all kinds at the same time, and the reports of the agents.

Anyone may give a Pod the agent's label, so `agents` says which Pods are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, get_args

import msgspec
from msgspec.structs import fields

from npu_agent.backoff import Backoff
from npu_agent.cli import CommandError
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.errors import IS_IT_KUBERNETES, unusable
from npu_agent.kube.objects import Object, Struct
from npu_agent.kube.request import Request, plural
from npu_agent.people.cluster.objects import AGENT, Cluster, Pod
from npu_agent.people.report import Report
from npu_agent.text import listed
from npu_agent.typedjson import InvalidJsonError, convert, decode

KINDS: dict[str, type[Object]] = {
    kind.name: get_args(kind.type)[0]
    for kind in fields(Cluster)
    if kind.name not in ("refused", "unread")
}
"""All that can be read, by the field of a Cluster."""
_EVERYWHERE = ("nodes", "pods")
"""What every API server has; Kubernetes 1.33 and earlier has no DRA."""
_NAMESPACED = ("pods", "claims", "templates")
_LIVING = "status.phase!=Succeeded,status.phase!=Failed"
"""Selects the Pods that hold something, or will: those that have ended may be many."""
_LIMIT = 500
"""Objects of a chunk, as kubectl's."""
_LARGEST = 128 * 2**20
"""Bytes of one: Nodes that list fifty images have 20 KiB."""
_DEADLINE = 30.0
"""Seconds for a chunk of a list."""
_PATIENCE = 60.0
"""Seconds for all of them, with waiting for a server that has too much to do."""
_REPORT = 5.0
"""Seconds for an agent's report: the proxy itself would wait 30 for a Node that is gone."""
_ALL_REPORTS = 15.0
"""Seconds for the agents' reports, together."""


class ListMeta(Struct, frozen=True):
    """The metadata of a chunk of a list."""

    next: str = msgspec.field(default="", name="continue")
    """Asks for the next chunk; "": there is none."""


class ObjectList(Struct, frozen=True):
    """A list, or a chunk of one; its items are read one by one."""

    metadata: ListMeta = ListMeta()
    items: tuple[msgspec.Raw, ...] | None = None


async def fetch(
    api: Api,
    *kinds: str,
    namespace: str = "",
    selectors: Mapping[str, str] = MappingProxyType({}),
    pod: str = "",
    node: str = "",
) -> Cluster:
    """Reads all objects of these kinds; `refused` names what the user may not read.

    Args:
        api: the API server.
        kinds: fields of a Cluster.
        namespace: of Pods, claims and templates; "": all.
        selectors: of labels, by the kind's field. DaemonSets are read with the agent's label.
        pod: the only Pod that is read, also when it has ended; "": all that have not.
        node: the Node of Pods and slices; "": all.

    Raises:
        ApiError: of any other kind.
    """
    refused: dict[str, str] = {}
    unread: list[str] = []
    labels = {**selectors, "daemon_sets": AGENT}
    on_node = f",spec.nodeName={node}" if node else ""
    field_selectors = {
        "pods": (f"metadata.name={pod}" if pod else _LIVING) + on_node,
        "slices": on_node.removeprefix(","),
    }

    async def read(kind: str) -> tuple[Any, ...]:
        query = {"limit": str(_LIMIT)}
        if field_selector := field_selectors.get(kind):
            query["fieldSelector"] = field_selector
        if label_selector := labels.get(kind):
            query["labelSelector"] = label_selector
        where = namespace if kind in _NAMESPACED else ""
        try:
            async with asyncio.timeout(_PATIENCE):
                objects, odd = await _all(api, kind, where, query)
        except TimeoutError:
            what = f"cannot list {kind}: the API server was overloaded for {_PATIENCE:g} s"
            raise ApiError(what, "try again later", kind=ErrorKind.TOO_MANY) from None
        except ApiError as error:
            if error.kind is ErrorKind.FORBIDDEN:
                refused[KINDS[kind].__name__] = error.what
            elif error.kind is not ErrorKind.NOT_FOUND:
                raise
            elif kind in _EVERYWHERE:
                raise ApiError(error.what, IS_IT_KUBERNETES, kind=error.kind) from error
            return ()
        if odd:
            unread.append(f"{plural(KINDS[kind].__name__)} left out: {listed(odd, 1)}")
        return objects

    lists = await asyncio.gather(*map(read, kinds))
    by_kind = dict(zip(kinds, lists, strict=True))
    return Cluster(**by_kind, refused=refused, unread=tuple(sorted(unread)))


async def _all(
    api: Api, kind: str, namespace: str, query: dict[str, str], *, again: bool = False
) -> tuple[tuple[Object, ...], list[str]]:
    """A list, chunk by chunk; apart, the objects with a field that is odd, and what is wrong.

    One that expires between two chunks is read `again` once.
    """
    items: list[Object] = []
    odd: list[str] = []
    pause = Backoff(longest=8.0)
    following = ""
    while True:
        request = Request(
            verb="list",
            kind=KINDS[kind].__name__,
            namespace=namespace,
            answer=ObjectList,
            query={**query, "continue": following} if following else query,
            largest=_LARGEST,
        )
        try:
            chunk = await api.ask(request, deadline=_DEADLINE)
        except ApiError as error:
            if error.kind is ErrorKind.TOO_MANY:
                await asyncio.sleep(pause.next(error.retry_after))
                continue
            # The server keeps what it listed for five minutes, or less if it has much to do.
            if error.status == HTTPStatus.GONE and following and not again:
                return await _all(api, kind, namespace, query, again=True)
            raise
        for item in chunk.items or ():
            try:
                items.append(decode(item, KINDS[kind]))
            except InvalidJsonError as error:
                odd.append(f"{_name(request, item)}: {error}")
        following = chunk.metadata.next
        if not following:
            return tuple(items), odd


def _name(request: Request[Any], item: msgspec.Raw) -> str:
    try:
        return decode(item, Object).key
    except InvalidJsonError as error:
        raise unusable(request, error) from error


@dataclass(frozen=True, slots=True)
class AgentReports:
    """The agents' reports by Node; else the reason why there is none."""

    found: Mapping[str, Report] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    """The user has no right to ask: those that are left were not asked."""


def agents(cluster: Cluster) -> dict[str, list[Pod]]:
    """The agents by Node: Pods of the agent's DaemonSet, two while it is rolled out."""
    by_node: dict[str, list[Pod]] = defaultdict(list)
    for pod in cluster.pods:
        if pod.spec.node_name and any(daemon_set.runs(pod) for daemon_set in cluster.daemon_sets):
            by_node[pod.spec.node_name].append(pod)
    return by_node


def only(node: str, pods: Sequence[Pod]) -> list[Pod]:
    """The agents of a Node, those that are not ending first.

    Raises:
        CommandError: they belong to several DaemonSets.
    """
    owners = {
        ref.uid: pod for pod in pods for ref in pod.metadata.owner_references if ref.controller
    }
    if len(owners) > 1:
        named = " and ".join(sorted(pod.key for pod in owners.values()))
        raise CommandError(
            f"Node {node} has agents of several DaemonSets, {named}: delete the one that is not "
            "npu-agent's, or label its Pods otherwise"
        )
    return sorted(pods, key=lambda pod: bool(pod.metadata.deletion_timestamp))


async def report_of(api: Api, node: str) -> Report:
    """/status.json of the agent on a Node; raises as `status_of`."""
    return _report(node, await status_of(api, node))


async def status_of(api: Api, node: str) -> dict[str, Any]:
    """/status.json of the agent on a Node, as it is.

    Raises:
        ApiError: of any kind.
        CommandError: no agent runs there, or several do.
    """
    cluster = await fetch(api, "pods", "daemon_sets", selectors={"pods": AGENT}, node=node)
    for refusal in cluster.refused.values():
        raise ApiError(refusal, kind=ErrorKind.FORBIDDEN)
    pods = only(node, agents(cluster)[node])
    if not pods:
        raise CommandError(
            f"no agent runs on Node {node}: `kubectl get pods -A -o wide -l {AGENT}`"
        )
    return await _status(api, pods)


async def _status(api: Api, pods: Sequence[Pod]) -> dict[str, Any]:
    """The first answer that can be read, by the API server's proxy; else the first error.

    Without a port the proxy takes the first one of the Pod, which may be another container's.
    """
    errors: list[ApiError] = []
    get = Request("get", "Pod", dict[str, Any], subresource="proxy/status.json")
    for pod in pods:
        for scheme in ("", "https:"):
            name = f"{scheme}{pod.name}:{pod.metrics_port or ''}"
            try:
                request = replace(get, namespace=pod.namespace, name=name)
                return await api.ask(request, deadline=_REPORT)
            except ApiError as error:
                errors.append(error)
            if errors[-1].kind is ErrorKind.UNAUTHORIZED:
                raise ApiError(
                    f"the agent's page of Pod {pod.key} wants a token (401), which the API "
                    "server's proxy does not pass on",
                    f"run `kubectl -n {pod.namespace} port-forward {pod.name} "
                    f"{pod.metrics_port or 9100}`, and get "
                    "/status.json with your token",
                    kind=ErrorKind.UNAUTHORIZED,
                )
            if errors[-1].kind in (ErrorKind.FORBIDDEN, ErrorKind.TIMEOUT):
                break
    raise errors[0]


def _report(node: str, status: object) -> Report:
    try:
        return convert(status, Report)
    except InvalidJsonError as error:
        what = f"the page of the agent on Node {node} cannot be used (another version?)"
        raise CommandError(f"{what}: {error}") from error


async def reports(api: Api, of: Mapping[str, Sequence[Pod]]) -> AgentReports:
    """The reports of these agents, by Node; what fails, or takes too long, is in the answer."""
    by_node: dict[str, Report] = {}
    failed: dict[str, str] = {}
    refused = ""

    async def ask(node: str, pods: Sequence[Pod]) -> None:
        nonlocal refused
        if refused:
            return
        try:
            by_node[node] = _report(node, await _status(api, only(node, pods)))
        except CommandError as error:
            failed[node] = str(error)
        except ApiError as error:
            if error.kind is ErrorKind.FORBIDDEN:
                refused = error.what
            else:
                failed[node] = str(error)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ALL_REPORTS):
            await asyncio.gather(*(ask(node, pods) for node, pods in of.items()))
    for node in of.keys() - by_node.keys() - failed.keys() if not refused else ():
        failed[node] = f"the agent's page was not read within {_ALL_REPORTS:g} s"
    return AgentReports(by_node, failed, refused)
