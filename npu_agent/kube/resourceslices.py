"""ResourceSlices of resource.k8s.io/v1: one driver's on one node."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from npu_agent.kube.client import Api, Request, path
from npu_agent.kube.errors import Attempt, Kind
from npu_agent.kube.node import FIELD_MANAGER

_ALL = path("apis", "resource.k8s.io", "v1", "resourceslices")
_TYPES = ("ADDED", "MODIFIED", "DELETED")
_SLACK = 15.0
"""Seconds after its time that a watch may take to end."""


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
    )
    answer = await api.ask_apart(request)
    try:
        return Listing(
            {each["metadata"]["name"]: each for each in answer.get("items") or ()},
            str(answer["metadata"]["resourceVersion"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise request.attempt.failed(
            Kind.GARBAGE, f"the API server's answer cannot be used: {error!r}"
        ) from error


async def watch(
    api: Api, node: str, driver: str, resource_version: str, *, seconds: float
) -> AsyncGenerator[dict[str, Any], None]:
    """The events after a `Listing`, for so many seconds; to be closed by its reader.

    Each has ``type`` (``ADDED``, ``MODIFIED``, ``DELETED``) and ``object``, the slice.

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
            "resourceVersion": resource_version,
            "timeoutSeconds": str(round(seconds)),
        },
    )
    async with contextlib.aclosing(api.watch(request, silence=seconds + _SLACK)) as events:
        async for event in events:
            meta = event["object"].get("metadata")
            name = meta.get("name") if isinstance(meta, dict) else None
            if event.get("type") not in _TYPES or not isinstance(name, str):
                raise request.attempt.failed(
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
    return await api.ask_apart(
        Request(
            attempt=_attempt(f"apply ResourceSlice {name}", "patch"),
            method="PATCH",
            path=_ALL + path(name),
            kind="ResourceSlice",
            content_type="application/apply-patch+yaml",
            query={"fieldManager": FIELD_MANAGER, "force": "true"},
            body=slice_,
        )
    )


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


def _of(node: str | None, driver: str) -> dict[str, str]:
    of_node = f"spec.nodeName={node}," if node else ""
    return {"fieldSelector": f"{of_node}spec.driver={driver}"}


def _attempt(doing: str, verb: str) -> Attempt:
    return Attempt(doing=doing, verb=verb, resource="resourceslices")
