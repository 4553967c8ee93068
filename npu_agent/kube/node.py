"""Our Node: read from the API server's cache; its labels and our condition by server-side apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from npu_agent.kube import objects
from npu_agent.kube.client import FIELD_MANAGER, Api
from npu_agent.kube.objects import Condition, Meta
from npu_agent.kube.request import Request


class Manager(msgspec.Struct, frozen=True):
    """An entry of managedFields (k8s.io/apimachinery, FieldsV1)."""

    manager: str = ""
    operation: str = ""
    subresource: str = ""
    fields: dict[str, dict[str, dict[str, Any]]] = msgspec.field(default={}, name="fieldsV1")
    """``{"f:metadata": {"f:labels": {"f:example.com/npu": {}}}}``."""

    @property
    def labels(self) -> frozenset[str]:
        keys = self.fields.get("f:metadata", {}).get("f:labels", {})
        return frozenset(key.removeprefix("f:") for key in keys if key.startswith("f:"))


class NodeMeta(Meta, frozen=True, kw_only=True):
    """A Node's metadata, with who has written what."""

    uid: Annotated[str, msgspec.Meta(min_length=1)]
    """Another one if the Node was deleted and created again."""
    resource_version: str
    managed_fields: tuple[Manager, ...] = ()

    @property
    def applied(self) -> frozenset[str]:
        """The keys of labels that this agent, or an earlier one, has applied.

        What we have by Update, or of a subresource, is another owner's.
        """
        ours = (FIELD_MANAGER, "Apply", "")
        return frozenset[str]().union(
            *(
                field.labels
                for field in self.managed_fields
                if (field.manager, field.operation, field.subresource) == ours
            )
        )


class ThisNode(objects.Node, frozen=True):
    """Our own Node; a request for its metadata only leaves the rest empty."""

    metadata: NodeMeta


CONDITION_MANAGER = "npu-agent-condition"
_FROM_CACHE = {"resourceVersion": "0"}
"""Any version: the API server answers from its cache."""


async def read(api: Api, name: str) -> NodeMeta:
    """The Node's metadata, from the API server's cache."""
    request = Request("get", "Node", ThisNode, name=name, metadata_only=True, query=_FROM_CACHE)
    return (await api.ask(request)).metadata


async def read_whole(api: Api, name: str, *, fresh: bool = False) -> ThisNode:
    """The Node with its status, from the cache unless `fresh`."""
    query = {} if fresh else _FROM_CACHE
    return await api.ask(Request("get", "Node", ThisNode, name=name, query=query))


async def apply_labels(api: Api, node: NodeMeta, labels: Mapping[str, str]) -> NodeMeta:
    """Makes `labels` what the agent owns on this Node; returns the Node after that.

    Keys that it applied before are removed, keys of others are taken over, and the rest stays. An
    apply that changes nothing writes nothing. It never creates a Node, which has another uid.

    Raises:
        ApiError: CONFLICT if the Node was deleted or created again.
    """
    metadata: dict[str, Any] = {"name": node.name, "uid": node.uid}
    if labels:  # an empty object would be owned too, and would stay behind
        metadata["labels"] = dict(labels)
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    request = Request("apply", "Node", ThisNode, name=node.name, metadata_only=True, body=body)
    return (await api.ask(request)).metadata


async def apply_conditions(api: Api, name: str, *conditions: Condition) -> None:
    """Makes these the conditions that the agent owns on this Node; all others stay.

    Their field manager is not that of the labels. An apply to the status never creates a Node.
    """
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    if conditions:
        body["status"] = {"conditions": msgspec.to_builtins(conditions)}
    request = Request("apply", "Node", ThisNode, name=name, metadata_only=True, body=body)
    await api.ask(replace(request, subresource="status", manager=CONDITION_MANAGER))
