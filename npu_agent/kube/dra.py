"""resource.k8s.io/v1: whether it is served, claims, which the driver only reads, and slices."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from npu_agent.core.pool import UID, AllocatedClaim, AllocatedDevice
from npu_agent.kube.client import Api
from npu_agent.kube.errors import unusable
from npu_agent.kube.objects import (
    Meta,
    Name,
    Pool,
    ResourceClaim,
    ResourceSlice,
    Struct,
    Versioned,
)
from npu_agent.kube.request import Request
from npu_agent.typedjson import InvalidJsonError, convert, decode

T = TypeVar("T")

Slice = Mapping[str, Any]

_LARGEST_LIST = 8 * 2**20
"""Bytes: 170 cards of eight cores in parts are 2 MiB. Read whole: for pages (``limit``) API servers
before 1.36 read the slices of all nodes from etcd."""
_LARGEST_POOL = 4 * 2**20
"""Bytes of a pool's slices that are decoded, which takes some ten times as much memory."""
_CONCURRENT_READS = 8
"""As many as `Api` makes: waiting there counts for a call's deadline."""


async def served(api: Api) -> bool:
    """Whether the API server serves resource.k8s.io/v1, as Kubernetes does from 1.34 on."""
    return await api.exists(Request("get", "APIResourceList", dict))


class _Meta(Meta, frozen=True, kw_only=True):
    name: Name
    namespace: Name
    uid: Annotated[str, msgspec.Meta(pattern=rf"^{UID}\Z")]


class _ResourceClaim(ResourceClaim, frozen=True):
    metadata: _Meta


def claim_of(answer: Mapping[str, Any], driver: str) -> AllocatedClaim:
    """A claim with what is this driver's of its allocation; raises InvalidJsonError."""
    claim = convert(answer, _ResourceClaim)
    return AllocatedClaim(
        namespace=claim.namespace,
        name=claim.name,
        uid=claim.uid,
        pods=claim.users,
        pod_uids=claim.pod_uids,
        parameters=tuple(
            config.source for config in claim.parameters if config.opaque.get("driver") == driver
        ),
        devices=tuple(
            AllocatedDevice(
                request=result.request.partition("/")[0],
                pool=result.pool,
                name=result.device,
                admin=bool(result.admin_access),
                tolerations=tuple(key.get("key") or "" for key in result.tolerations),
            )
            for result in claim.results
            if result.driver == driver
        ),
    )


async def read_claim(
    api: Api, namespace: str, name: str, *, deadline: float | None = None
) -> dict[str, Any]:
    """A claim as the API server has it; raises ApiError."""
    request = Request("get", "ResourceClaim", dict[str, Any], namespace=namespace, name=name)
    return await api.ask(request, deadline=deadline)


class ClaimReader:
    """Reads claims with what is one driver's of them."""

    def __init__(self, api: Api, driver: str) -> None:
        self._api = api
        self._driver = driver
        self._reading = asyncio.Semaphore(_CONCURRENT_READS)

    async def read(self, namespace: str, name: str) -> AllocatedClaim:
        """Returns a claim as the API server has it now.

        Raises:
            ApiError: it cannot be read.
            InvalidJsonError: it is malformed.
        """
        async with self._reading:
            answer = await read_claim(self._api, namespace, name)
        return claim_of(answer, self._driver)


class Listing(NamedTuple):
    """The slices at one moment."""

    slices: Mapping[str, Slice]
    """Those of the node's pool, by name. Beyond 4 MiB, which no agent writes, one has only what
    `SliceHead` has of it: so it differs from whatever is wanted."""
    foreign: tuple[str, ...]
    """The names of those in another pool, which are not the agent's."""
    resource_version: str
    """A watch begins there."""


class _HeadMeta(Struct, frozen=True):
    name: str
    resource_version: str


class _HeadPool(Pool, frozen=True):
    resource_slice_count: int


class _HeadSpec(Struct, frozen=True):
    pool: _HeadPool


class SliceHead(Struct, frozen=True):
    """A ResourceSlice without its devices, which others may have made large."""

    metadata: _HeadMeta
    spec: _HeadSpec


class _List(Versioned, frozen=True):
    items: list[msgspec.Raw] | None = None


async def list_slices(api: Api, node: str | None, driver: str) -> Listing:
    """The slices of a driver on a node, or on all; NOT_FOUND without resource.k8s.io/v1.

    Who may write ResourceSlices can make many for this node: what is not used is not decoded.
    """
    query = _of(node, driver)
    request = Request("list", "ResourceSlice", _List, query=query, largest=_LARGEST_LIST)
    answer = await api.ask(request)
    slices: dict[str, Slice] = {}
    foreign: list[str] = []
    room = _LARGEST_POOL
    for item in answer.items or ():
        head = _decoded(request, item, SliceHead)
        name = head.metadata.name
        if node and head.spec.pool.name != node:
            foreign.append(name)
            continue

        room -= memoryview(item).nbytes
        if room < 0:
            slices[name] = msgspec.to_builtins(head)
        else:
            slices[name] = _checked(request, _decoded(request, item, dict[str, Any]))
    return Listing(slices, tuple(foreign), answer.metadata.resource_version)


def watch_slices(node: str, driver: str) -> Request[Any]:
    """Returns the request for `follow`: the slices, as far as they are read here."""
    return Request("watch", "ResourceSlice", SliceHead, query=_of(node, driver))


async def apply_slice(api: Api, slice_: Slice) -> Slice:
    """Creates or changes a slice by server-side apply; returns it. No change writes nothing."""
    name = slice_["metadata"]["name"]
    request = Request("apply", "ResourceSlice", dict[str, Any], name=name, body=slice_)
    return _checked(request, await api.ask(request))


async def delete_slice(api: Api, name: str) -> bool:
    """Deletes a slice; returns whether there was one."""
    # The API server answers with what it has deleted.
    return await api.exists(Request("delete", "ResourceSlice", SliceHead, name=name))


def _decoded(request: Request[Any], item: msgspec.Raw, type_: type[T]) -> T:
    try:
        return decode(item, type_)
    except InvalidJsonError as error:
        raise unusable(request, error) from error


def _checked(request: Request[Any], item: dict[str, Any]) -> dict[str, Any]:
    """`item`, or an ApiError if it lacks what is read of it."""
    try:
        convert(item, ResourceSlice)
    except InvalidJsonError as error:
        raise unusable(request, error) from error
    return item


def _of(node: str | None, driver: str) -> dict[str, str]:
    of_node = f"spec.nodeName={node}," if node else ""
    return {"fieldSelector": f"{of_node}spec.driver={driver}"}
