"""ResourceSlices of resource.k8s.io/v1: one driver's on one node."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from npu_agent.kube.client import Api, Request, part, path
from npu_agent.kube.errors import Attempt, Kind
from npu_agent.kube.node import FIELD_MANAGER
from npu_agent.text import one_line

_ALL = path("apis", "resource.k8s.io", "v1", "resourceslices")
_LARGEST_LIST = 16 * 2**20
"""Bytes: 170 cards of eight cores that are offered in parts are 2 MiB. It is read whole, since
pages of it (``limit``) would have API servers before 1.36 read the slices of all nodes from
etcd."""
_SILENCE = 150.0
"""Seconds: the API server sends a bookmark each minute (k8s.io/apiserver, cacher.go,
defaultBookmarkFrequency), so two that are missing are a connection that is broken."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What there was at one moment."""

    slices: Mapping[str, Mapping[str, Any]]
    """By name."""
    resource_version: str
    """Of that moment: a watch begins there."""


async def read(api: Api, node: str | None, driver: str) -> Listing:
    """The slices of a driver on a node; None: on all nodes.

    Raises:
        ApiError: of any kind; NOT_FOUND if the API server does not serve resource.k8s.io/v1.
    """
    request = Request(
        attempt=_attempt(f"list the ResourceSlices of {'this node' if node else driver}", "list"),
        method="GET",
        path=_ALL,
        kind="ResourceSliceList",
        query=_of(node, driver),
        largest=_LARGEST_LIST,
    )
    answer = await api.ask_apart(request)
    try:
        found = {each["metadata"]["name"]: each for each in answer.get("items") or ()}
        version = str(answer["metadata"]["resourceVersion"])
    except (KeyError, TypeError, AttributeError) as error:
        raise request.attempt.failed(
            Kind.GARBAGE, f"the API server's answer cannot be used: {one_line(repr(error))}"
        ) from error
    if not all(map(_is_slice, found.values())):
        raise request.attempt.failed(Kind.GARBAGE, "the API server lists what is no ResourceSlice")
    return Listing(found, version)


@contextlib.asynccontextmanager
async def watch(
    api: Api, node: str, driver: str, resource_version: str, *, seconds: float
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Opens a watch for so many seconds: the events after a `Listing`, or another event.

    Each has ``type`` (``ADDED``, ``MODIFIED``, ``DELETED``) and ``object``, the slice; or it is a
    ``BOOKMARK``, whose object has a resourceVersion only. A watch may begin after any of them.

    Raises:
        ApiError: as `Api.watch`.
    """
    request = Request(
        attempt=_attempt("watch the ResourceSlices of this node", "watch"),
        method="GET",
        path=_ALL,
        kind="WatchEvent",
        query={
            **_of(node, driver),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(round(seconds)),
        },
    )
    async with api.watch(request, silence=_SILENCE) as events:
        yield _checked(request.attempt, events)


async def _checked(
    attempt: Attempt, events: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        match event.get("type"):
            case "ADDED" | "MODIFIED" | "DELETED":
                good = _is_slice(event["object"])
            case type_:
                good = type_ == "BOOKMARK"
        version = part(event["object"], "metadata").get("resourceVersion")
        if not (good and version and isinstance(version, str)):
            raise attempt.failed(
                Kind.GARBAGE, "the API server sent an event that is none of a ResourceSlice"
            )
        yield event


async def apply(api: Api, slice_: Mapping[str, Any]) -> dict[str, Any]:
    """Creates or changes a slice by server-side apply; returns it as it then is.

    One that changes nothing writes nothing.

    Raises:
        ApiError: of any kind.
    """
    name = slice_["metadata"]["name"]
    request = Request(
        attempt=_attempt(f"apply ResourceSlice {name}", "patch"),
        method="PATCH",
        path=_ALL + path(name),
        kind="ResourceSlice",
        content_type="application/apply-patch+yaml",
        query={"fieldManager": FIELD_MANAGER, "force": "true"},
        body=slice_,
    )
    answer = await api.ask_apart(request)
    if not _is_slice(answer):
        raise request.attempt.failed(Kind.GARBAGE, "the API server answered with no ResourceSlice")
    return answer


async def dry_run(api: Api, slice_: Mapping[str, Any]) -> dict[str, Any]:
    """What the API server would make of a new slice of this name; nothing is written.

    Raises:
        ApiError: of any kind.
    """
    return await api.ask_apart(
        Request(
            attempt=_attempt("create a ResourceSlice, as a dry run", "create"),
            method="POST",
            path=_ALL,
            kind="ResourceSlice",
            query={"dryRun": "All"},
            body=slice_,
        )
    )


async def delete(api: Api, name: str) -> bool:
    """Deletes a slice; returns whether there was one.

    Raises:
        ApiError: of any kind but NOT_FOUND.
    """
    return await api.ask_for(
        Request(
            attempt=_attempt(f"delete ResourceSlice {name}", "delete"),
            method="DELETE",
            path=_ALL + path(name),
            kind="ResourceSlice",  # the API server answers with what it has deleted
        )
    )


def _is_slice(found: Mapping[str, Any]) -> bool:
    """Whether it has what is read of a slice, and in the form of k8s.io/api/resource/v1."""
    meta, spec = part(found, "metadata"), part(found, "spec")
    devices, owners = spec.get("devices") or [], meta.get("ownerReferences") or []
    pool = part(spec, "pool")
    return (
        isinstance(meta.get("name"), str)
        and isinstance(owners, list)
        and isinstance(pool.get("generation"), int)
        and isinstance(pool.get("resourceSliceCount"), int)
        and isinstance(devices, list)
        and all(map(_is_device, devices))
    )


def _is_device(found: object) -> bool:
    taints = found.get("taints") or [] if isinstance(found, Mapping) else None
    return (
        isinstance(found, Mapping)
        and isinstance(found.get("name"), str)
        and isinstance(taints, list)
        and all(
            isinstance(taint, Mapping) and all(isinstance(text, str) for text in taint.values())
            for taint in taints
        )
    )


def _of(node: str | None, driver: str) -> dict[str, str]:
    of_node = f"spec.nodeName={node}," if node else ""
    return {"fieldSelector": f"{of_node}spec.driver={driver}"}


def _attempt(doing: str, verb: str) -> Attempt:
    return Attempt(doing=doing, verb=verb, resource="resourceslices")
