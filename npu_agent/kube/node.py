"""Our Node: read from the API server's cache, and its labels by server-side apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from npu_agent.kube.client import Api, Request, part, path
from npu_agent.kube.errors import Attempt, Kind

FIELD_MANAGER = "npu-agent"
"""Who owns the labels, in the Node's managedFields."""

_METADATA = "PartialObjectMetadata"
_METADATA_ONLY = f"application/json;as={_METADATA};g=meta.k8s.io;v=v1"


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """A Node's metadata, as the API server answered it."""

    name: str
    uid: str
    """Another one if the Node was deleted and created again."""
    resource_version: str
    labels: Mapping[str, str]
    """All of them, whoever applied them."""
    applied: frozenset[str]
    """The keys of labels that this agent, or one before it, put there by server-side apply."""


async def read(api: Api, name: str) -> NodeMeta:
    """The Node's metadata, from the API server's cache: it may be a moment old.

    Raises:
        ApiError: of any kind.
    """
    return await _meta(api, _get(name, _METADATA, _METADATA_ONLY))


async def read_whole(api: Api, name: str) -> dict[str, Any]:
    """The Node with its status, from the API server's cache.

    Raises:
        ApiError: of any kind.
    """
    return await api.ask(_get(name, "Node"))


async def apply_labels(api: Api, node: NodeMeta, labels: Mapping[str, str]) -> NodeMeta:
    """Makes `labels` what the agent owns on this Node; returns the Node after that.

    Keys that it applied before and that are not among them are removed; a key that somebody else
    set is taken over; all other keys stay as they are. An apply that changes nothing writes
    nothing. It never creates a Node: the uid has to be that of an existing one.

    Raises:
        ApiError: of any kind; CONFLICT if the Node was deleted or created again.
    """
    metadata: dict[str, Any] = {"name": node.name, "uid": node.uid}
    if labels:  # an empty object would be owned too, and would stay behind
        metadata["labels"] = dict(labels)
    request = Request(
        attempt=Attempt(doing=f"apply labels to Node {node.name}", verb="patch", resource="nodes"),
        method="PATCH",
        path=path("api", "v1", "nodes", node.name),
        kind=_METADATA,
        accept=_METADATA_ONLY,
        content_type="application/apply-patch+yaml",
        query={"fieldManager": FIELD_MANAGER, "force": "true"},
        body={"apiVersion": "v1", "kind": "Node", "metadata": metadata},
    )
    return await _meta(api, request)


def _get(name: str, kind: str, accept: str = "application/json") -> Request:
    return Request(
        attempt=Attempt(doing=f"get Node {name}", verb="get", resource="nodes"),
        method="GET",
        path=path("api", "v1", "nodes", name),
        query={"resourceVersion": "0"},  # any will do: the API server answers from its cache
        kind=kind,
        accept=accept,
    )


async def _meta(api: Api, request: Request) -> NodeMeta:
    answer = await api.ask(request)
    try:
        return node_meta(answer)
    except ValueError as error:
        raise request.attempt.failed(
            Kind.GARBAGE, f"the API server's answer cannot be used: {error}"
        ) from error


def node_meta(answer: Mapping[str, Any]) -> NodeMeta:
    """A PartialObjectMetadata as NodeMeta.

    Raises:
        ValueError: it lacks something, or has it in another form; the message says what.
    """
    meta = part(answer, "metadata")
    name, uid, version = (meta.get(key) for key in ("name", "uid", "resourceVersion"))
    if not (isinstance(name, str) and isinstance(uid, str) and isinstance(version, str) and uid):
        raise ValueError("its metadata lacks name, uid or resourceVersion")
    labels = meta.get("labels")
    if labels is None:
        labels = {}
    if not isinstance(labels, Mapping) or not all(isinstance(v, str) for v in labels.values()):
        raise ValueError("its metadata.labels are not an object of strings")
    applied = applied_labels(meta.get("managedFields"))
    return NodeMeta(name, uid, version, MappingProxyType(dict(labels)), applied)


def applied_labels(managed_fields: object) -> frozenset[str]:
    """The label keys that our field manager owns by Apply; what is malformed counts as nothing.

    The format is FieldsV1 of k8s.io/apimachinery: ``{"f:metadata": {"f:labels": {"f:KEY": {}}}}``.
    Our entry by Update, or for a subresource, is another owner: an apply leaves it alone.
    """
    entries = managed_fields if isinstance(managed_fields, list) else ()
    ours = [
        part(entry, "fieldsV1", "f:metadata", "f:labels")
        for entry in entries
        if isinstance(entry, Mapping)
        and (entry.get("manager"), entry.get("operation")) == (FIELD_MANAGER, "Apply")
        and not entry.get("subresource")
    ]
    return frozenset(
        key.removeprefix("f:") for fields in ours for key in fields if key.startswith("f:")
    )
