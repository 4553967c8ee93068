"""ResourceSlices of resource.k8s.io/v1: one driver's on one node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from npu_agent.kube.client import Api
from npu_agent.kube.errors import unusable
from npu_agent.kube.objects import ResourceSlice, Versioned
from npu_agent.kube.request import Request
from npu_agent.typedjson import InvalidJsonError, convert

Slice = Mapping[str, Any]

_LARGEST_LIST = 16 * 2**20
"""Bytes: 170 cards of eight cores in parts are 2 MiB. Read whole: for pages (``limit``) API servers
before 1.36 read the slices of all nodes from etcd."""


class Listing(NamedTuple):
    """The slices at one moment."""

    slices: Mapping[str, Slice]
    """By name."""
    resource_version: str
    """A watch begins there."""


class _List(Versioned, frozen=True):
    items: list[dict[str, Any]] | None = None


async def read(api: Api, node: str | None, driver: str) -> Listing:
    """The slices of a driver on a node, or on all; NOT_FOUND without resource.k8s.io/v1."""
    query = _of(node, driver)
    request = Request("list", "ResourceSlice", _List, query=query, largest=_LARGEST_LIST)
    answer = await api.ask(request)
    checked = [_checked(request, item) for item in answer.items or ()]
    slices = {item["metadata"]["name"]: item for item in checked}
    return Listing(slices, answer.metadata.resource_version)


def watch(node: str, driver: str) -> Request[Any]:
    """Returns the request for `follow`: the slices, as far as they are read here."""
    return Request("watch", "ResourceSlice", ResourceSlice, query=_of(node, driver))


async def apply(api: Api, slice_: Slice) -> Slice:
    """Creates or changes a slice by server-side apply; returns it. No change writes nothing."""
    name = slice_["metadata"]["name"]
    request = Request("apply", "ResourceSlice", dict[str, Any], name=name, body=slice_)
    return _checked(request, await api.ask(request))


async def delete(api: Api, name: str) -> bool:
    """Deletes a slice; returns whether there was one."""
    # The API server answers with what it has deleted.
    return await api.exists(Request("delete", "ResourceSlice", dict, name=name))


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
