"""The stand-in for the API server, with more of what a real one does, and made to fail.

It remembers what it was asked. What it cannot show is tested on a real API server (tests/e2e).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from npu_agent.people.simulator.apiserver import (
    GROUP,
    NODES,
    SLICES,
    Object,
    StandInApiServer,
    verb_of,
)
from tests.kube.helpers import Reply, failure, status

COUNTERS = {"sharedCounters", "consumesCounters"}
"""Fields that an API server without DRAPartitionableDevices drops."""
_WRITES = ("create", "patch", "apply", "delete")


class FaultyApiServer(StandInApiServer):
    """An API server with one Node; serve `answer` over HTTP, or call `act`.

    Attributes:
        groups: paths of the API groups that it serves.
        calls: in order: `VERB` or `VERB NAME`; the verb is that of RBAC, but `apply` for
            server-side apply; `list nodes` and `watch nodes` are of Nodes.
        watches: the query of each watch of slices.
        readers: who may read Nodes, slices and claims: ``account``, and ``node`` by impersonation.
        dropped: fields of slices and their devices that are dropped, as by a feature gate.
        trouble: if set, answers everything.
        instead: by verb: what is answered in its place.
        open: the watches.
    """

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.groups = {GROUP}
        self.calls: list[str] = []
        self.watches: list[dict[str, str]] = []
        self.readers = {"account"}
        self.dropped: set[str] = set()
        self.trouble: Reply | None = None
        self.instead: dict[str, Reply] = {}
        self.open: list[web.Request] = []
        self._oldest = 0
        """The version from which on the events are known."""

    @property
    def writes(self) -> list[str]:
        """The calls that would change something."""
        return [call for call in self.calls if call.startswith(_WRITES)]

    def taints(self) -> dict[str, list[Object]]:
        """The taints of each device that has some, by the device's name."""
        devices = self.devices().items()
        return {name: device["taints"] for name, device in devices if device.get("taints")}

    # --- what others do to it -------------------------------------------------------------------

    def put(self, name: str, **spec: Any) -> None:
        """Another client creates a slice, or changes these fields of its spec."""
        new = {"kind": "ResourceSlice", "metadata": {"name": name}, "spec": {}}
        live = self.slices.get(name, new)
        event = "MODIFIED" if name in self.slices else "ADDED"
        self.store(event, SLICES, {**live, "spec": {**live["spec"], **spec}})

    def delete(self, *names: str) -> None:
        """Another client deletes these slices; without names all, as a kubelet that starts."""
        for name in names or list(self.slices):
            self.store("DELETED", SLICES, self.slices[name])

    def annotate(self, key: str, value: str | None) -> None:
        """Another client sets an annotation of the Node, or removes it."""
        self.act("patch", f"{NODES}/{self.node}", {"metadata": {"annotations": {key: value}}})

    def forget_events(self) -> None:
        """Makes all versions so far too old to watch from."""
        self._oldest = self.version.value + 1
        self.version.publish(self._oldest)
        self.events.clear()

    def cut(self) -> None:
        """Breaks every watch."""
        for request in self.open:
            if request.transport:
                request.transport.close()

    # --- what it answers ------------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        verb = verb_of(request)
        _, _, name = request.path.rpartition("/")
        if request.path.endswith("/status"):
            name = "status"
        if request.path == NODES:
            verb += " nodes"
        plain = verb in ("list", "watch", "create", "list nodes", "watch nodes")
        self.calls.append(verb if plain else f"{verb} {name}")
        if verb == "watch":
            self.watches.append(dict(request.query))
        if reply := self.trouble or self.instead.get(verb) or self._refusal(verb, request):
            return await reply(request)
        if 0 < int(request.query.get("resourceVersion", 0)) < self._oldest:
            return await status(410, "too old resource version")(request)
        return await super().answer(request)

    async def watch(self, request: web.Request, stream: web.StreamResponse) -> None:
        self.open.append(request)
        try:
            await super().watch(request, stream)
        finally:
            self.open.remove(request)

    def _refusal(self, verb: str, request: web.Request) -> Reply | None:
        """Returns the refusal by RBAC, impersonation or the Node authorizer; None: allowed."""
        user = request.headers.get("Impersonate-User")
        verb, path = verb.partition(" ")[0], request.path
        collection, _, name = path.rpartition("/")
        if user is None:
            of_nodes = path.startswith((NODES, SLICES)) or "/resourceclaims/" in path
            denied = verb in ("get", "list", "watch") and of_nodes and "account" not in self.readers
            return status(403, f"cannot {verb} resource") if denied else None
        if user != f"system:node:{self.node}" or "node" not in self.readers:
            return status(403, f'cannot impersonate-on:associated-node:{verb} resource "nodes"')
        if verb not in ("get", "list", "watch"):
            return status(403, f"cannot impersonate-on:associated-node:{verb} resource")
        own = {NODES: f"metadata.name={self.node}", SLICES: f"spec.nodeName={self.node}"}
        selected = request.query.get("fieldSelector", "").split(",")
        if path in own and own[path] not in selected:
            return status(403, "can only list and watch what is its own")
        unknown = collection.endswith("/resourceclaims") and name not in self.objects[collection]
        if unknown or (collection == NODES and name != self.node):
            return status(403, f"no relationship found between node '{self.node}' and this object")
        return None

    def act(self, verb: str, path: str, body: Object) -> tuple[int, Object]:
        """The HTTP status and the object that answer a call; `path` is of it or its collection."""
        if path.startswith("/apis/") and not path.startswith(tuple(self.groups)):
            return 404, failure(404, "the server could not find the requested resource")
        body = copy.deepcopy(body)
        if verb != "create":
            return super().act(verb, path, body)
        name = body["metadata"]["name"]
        if name in self.objects[path]:
            return 409, failure(409, f'"{name}" already exists')
        return 201, self.store("ADDED", path, body)

    def apply(self, collection: str, live: Object, body: Object) -> tuple[int, Object]:
        """Server-side apply of labels, of owners and of a whole spec, as the agent."""
        meta, before = body["metadata"], live.get("metadata", {})
        if meta.get("uid", before.get("uid")) != before.get("uid"):
            return 409, failure(409, "the UID in the precondition is that of another object")
        mine = applied(live)
        labels = {key: value for key, value in before.get("labels", {}).items() if key not in mine}
        labels |= meta.get("labels", {})
        stays = {key: value for key, value in before.items() if key != "ownerReferences"}
        object_ = self._kept({**live, **body}, live)
        object_["metadata"] = {**stays, **meta, "managedFields": own(meta.get("labels", ()))}
        if labels:
            object_["metadata"]["labels"] = labels
        if object_ == live:  # what changes nothing is not written
            return 200, live
        return 200, self.store("MODIFIED" if live else "ADDED", collection, object_)

    def _kept(self, object_: Object, live: Object) -> Object:
        """Returns a slice without the dropped fields.

        Counters are kept where there have been some (k8s.io/kubernetes, resourceslice/strategy.go,
        dropDisabledDRAPartitionableDevicesFields).
        """
        if "spec" not in object_:
            return object_
        before = live.get("spec", {})
        counted = "sharedCounters" in before or any(
            "consumesCounters" in device for device in before.get("devices", ())
        )
        off = self.dropped - (COUNTERS if counted else set())
        spec = {
            key: value for key, value in object_["spec"].items() if value != [] and key not in off
        }
        # A second a version, so that no two writes are at the same time.
        now = datetime.fromtimestamp(self.version.value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for device in spec.get("devices", ()):
            for field in off:
                device.pop(field, None)
            for taint in device.get("taints", ()):
                taint.setdefault("timeAdded", now)
        return {**object_, "spec": spec}


def own(labels: Iterable[str]) -> list[Object]:
    """ManagedFields that say that the agent applied these labels."""
    fields: Object = {"f:metadata": {"f:labels": {f"f:{key}": {} for key in labels}}}
    return [{"manager": "npu-agent", "operation": "Apply", "fieldsV1": fields}]


def applied(object_: Object) -> frozenset[str]:
    """The labels that the agent has applied, by managedFields."""
    return frozenset(
        key.removeprefix("f:")
        for entry in object_.get("metadata", {}).get("managedFields", ())
        if entry["manager"] == "npu-agent"
        for key in entry["fieldsV1"]["f:metadata"]["f:labels"]
    )
