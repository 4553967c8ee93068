"""Our Node: read from the API server's cache, watched, and written by server-side apply.

We write labels and our condition. The one watch has what others say of the Node there, as a small
value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from npu_agent.feed import Feed
from npu_agent.kube import follow, objects
from npu_agent.kube.client import FIELD_MANAGER, Api, WatchEvent
from npu_agent.kube.errors import ApiError
from npu_agent.kube.follow import WatchTiming
from npu_agent.kube.objects import Condition, Meta
from npu_agent.kube.request import Request
from npu_agent.logs import Reporter, logger
from npu_agent.supervise import background

log = logger(__name__)


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


_LIFECYCLE = (
    "MaintenancePlanned",
    "MaintenanceInProgress",
    "DrainInProgress",
    "Drained",
    "GracefulNodeShutdownInProgress",
)
"""Conditions by which people say that they work on a Node: KEP-5683."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNode:
    """The watched parts of our Node; the rest of it changes much more often."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    unschedulable: bool
    """Whether it is cordoned."""
    conditions: Mapping[str, str]
    """By type, the status: ``True``, ``False`` or ``Unknown``."""

    @property
    def maintenance(self) -> str:
        """What people do on it; empty: nothing."""
        phases = [type_ for type_ in _LIFECYCLE if self.conditions.get(type_) == "True"]
        return ", ".join([*phases, *(["the Node is cordoned"] if self.unschedulable else [])])


class NodeWatch:
    """Keeps `state` true while `wanted`: the Node as it was seen last, None before that.

    Where the API server is away, or the Node is deleted, the last value stays.
    """

    def __init__(
        self,
        api: Api,
        node_name: str | None,
        wanted: Feed[bool],
        timing: WatchTiming | None = None,
    ) -> None:
        """Asks nothing yet; without a name it never does."""
        self.state: Feed[OwnNode | None] = Feed(None)
        self._api = api
        self._node_name = node_name
        self._wanted = wanted
        self._timing = timing or WatchTiming()
        self._reporter = Reporter(
            log,
            "changes of this Node are not seen; retrying",
            "changes of this Node are seen again",
        )

    @property
    def error(self) -> str | None:
        """Why the Node cannot be followed, with the remedy; None while nothing is wrong."""
        return self._reporter.reason

    async def run(self) -> None:
        """Follows the Node until cancelled; without a name it has nothing to do."""
        if (name := self._node_name) is None:
            await asyncio.Event().wait()
            return
        only = {"fieldSelector": f"metadata.name={name}"}
        while True:
            await self._wanted.until(bool)
            async with background(
                follow.follow(
                    self._api,
                    Request("watch", "Node", ThisNode, query=only),
                    follow.WatchHooks(
                        see=self._see, opened=self._reporter.works, failed=self._failed
                    ),
                    self._timing,
                )
            ):
                await self._wanted.until(lambda wanted: not wanted)
            self._reporter.works()

    def _see(self, event: WatchEvent) -> None:
        if event.type != "DELETED":
            node: ThisNode = event.object
            conditions = {condition.type: condition.status for condition in node.status.conditions}
            self.state.publish(
                OwnNode(
                    labels=node.metadata.labels,
                    annotations=node.metadata.annotations,
                    unschedulable=node.spec.unschedulable,
                    conditions=conditions,
                )
            )

    def _failed(self, _doing: str, error: ApiError, trouble: bool) -> None:
        if trouble:
            self._reporter.failed(error)
