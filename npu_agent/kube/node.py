"""What the agent knows of a Node: the part of its metadata that labels need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

FIELD_MANAGER = "npu-agent"
"""Who owns the labels, in the Node's managedFields."""


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """A Node's metadata, as the API server answered it."""

    name: str
    uid: str
    """Another one if the Node was deleted and made anew."""
    resource_version: str
    labels: Mapping[str, str]
    """All of them, whoever put them there."""
    applied: frozenset[str]
    """The keys of labels that the agent put there by server-side apply, now or in a life before."""


def node_meta(answer: Mapping[str, Any]) -> NodeMeta:
    """A PartialObjectMetadata as NodeMeta.

    Raises:
        ValueError: it lacks something, or has it in another form; the message says what.
    """
    meta = answer.get("metadata")
    meta = meta if isinstance(meta, Mapping) else {}
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
    An entry of ours by Update, or for a subresource, is another owner: an apply leaves it alone.
    """
    keys = set()
    for entry in managed_fields if isinstance(managed_fields, list) else ():
        if (
            isinstance(entry, Mapping)
            and entry.get("manager") == FIELD_MANAGER
            and entry.get("operation") == "Apply"
            and not entry.get("subresource")
        ):
            fields: object = entry
            for step in ("fieldsV1", "f:metadata", "f:labels"):
                fields = fields.get(step) if isinstance(fields, Mapping) else None
            keys |= {
                key.removeprefix("f:")
                for key in (fields if isinstance(fields, Mapping) else ())
                if isinstance(key, str) and key.startswith("f:")
            }
    return frozenset(keys)
