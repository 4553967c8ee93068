"""Reads a cluster: lists by pages, all kinds at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_args

import msgspec
from msgspec.structs import fields

from npu_agent.backoff import Backoff
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.errors import IS_IT_KUBERNETES
from npu_agent.kube.objects import Object, Struct
from npu_agent.kube.request import Request
from npu_agent.people.cluster.objects import AGENT, Cluster

T = TypeVar("T")

KINDS: dict[str, type[Object]] = {
    field.name: get_args(field.type)[0] for field in fields(Cluster) if field.name != "refused"
}
"""All that can be read, by the field of a Cluster."""
_EVERYWHERE = ("nodes", "pods")
"""What every API server has; Kubernetes 1.33 and earlier has no DRA."""
_NAMESPACED = ("pods", "claims", "templates")
_LIVING = "status.phase!=Succeeded,status.phase!=Failed"
"""Selects the Pods that hold something, or will: those that have ended may be many."""
_LIMIT = 500
"""Objects of a page, as kubectl's."""
_LARGEST = 128 * 2**20
"""Bytes of one: Nodes that list fifty images have 20 KiB."""
_DEADLINE = 30.0
"""Seconds for a page."""
_PATIENCE = 60.0
"""Seconds for all of them, with waiting for a server that has too much to do."""


class ListMeta(Struct, frozen=True):
    """The metadata of a page of a list."""

    next: str = msgspec.field(default="", name="continue")
    """Asks for the next page; "": there is none."""


class ObjectList(Struct, Generic[T], frozen=True):
    """A list, or a page of one."""

    metadata: ListMeta = ListMeta()
    items: tuple[T, ...] | None = None


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
                return await _all(api, kind, where, query)
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

    lists = await asyncio.gather(*map(read, kinds))
    return Cluster(**dict(zip(kinds, lists, strict=True)), refused=refused)


async def _all(api: Api, kind: str, namespace: str, query: dict[str, str]) -> tuple[Object, ...]:
    """A list, page by page."""
    items: list[Object] = []
    pause = Backoff(longest=8.0)
    following = ""
    list_of: Any = ObjectList
    while True:
        request: Request[ObjectList[Any]] = Request(
            verb="list",
            kind=KINDS[kind].__name__,
            namespace=namespace,
            answer=list_of[KINDS[kind]],
            query={**query, "continue": following} if following else query,
            largest=_LARGEST,
        )
        try:
            page = await api.ask(request, deadline=_DEADLINE)
        except ApiError as error:
            if error.kind is not ErrorKind.TOO_MANY:
                raise
            await asyncio.sleep(pause.next(error.retry_after))
            continue
        items += page.items or ()
        following = page.metadata.next
        if not following:
            return tuple(items)
