"""A stand-in for the API server, for the demo, tests and benchmarks.

It keeps objects by their paths and does with them what the agent asks for: get, list, watch,
create, patch, server-side apply, delete. `trouble` and `instead` make it fail. What it cannot show
is tested on a real API server (tests/e2e).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from aiohttp import web

from npu_agent.core.claim import ClaimRef
from npu_agent.feed import Feed

NODES = "/api/v1/nodes"
GROUP = "/apis/resource.k8s.io/v1"
SLICES = f"{GROUP}/resourceslices"
COUNTERS = {"sharedCounters", "consumesCounters"}
"""Fields that an API server without DRAPartitionableDevices drops."""
_KINDS = {
    "nodes": "Node",
    "events": "Event",
    "resourceslices": "ResourceSlice",
    "resourceclaims": "ResourceClaim",
}
"""By the last part of a collection's path."""
_WRITES = ("create", "patch", "apply", "delete")
_CLOSING = 0.1
"""Seconds for requests to end by themselves."""

Object = dict[str, Any]
Device = Mapping[str, Any]
"""A device of a ResourceSlice."""
Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


def says(
    body: object, status: int = 200, headers: dict[str, str] | None = None, **kwargs: Any
) -> Reply:
    """A reply with the JSON of `body`, or the text or bytes that it is."""
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    data = content.encode() if isinstance(content, str) else content

    async def reply(_: web.Request) -> web.StreamResponse:
        return web.Response(body=data, status=status, headers=headers, **kwargs)

    return reply


def status(code: int, message: str, **headers: str) -> Reply:
    """A reply with a Status, as Kubernetes refuses what it does not do."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return says(_failure(code, message), code, named)


async def hangs(_: web.Request) -> web.StreamResponse:
    """Never replies."""
    await asyncio.Event().wait()
    raise AssertionError


async def drops(request: web.Request) -> web.StreamResponse:
    """Ends the connection before there is an answer."""
    if request.transport:
        request.transport.close()
    return web.Response()


@contextlib.asynccontextmanager
async def served(answer: Reply, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serves `answer` on a free port of this host; yields its URL."""
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=_CLOSING, handler_cancellation=True
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        host, port = runner.addresses[0]
        yield f"{'https' if tls else 'http'}://{host}:{port}"
    finally:
        await runner.cleanup()


class StandInApiServer:
    """An API server with one Node; serve `answer` over HTTP, or call `act`.

    Attributes:
        objects: by the path of their collection, and then by name.
        slices: those of `objects` that are ResourceSlices.
        groups: paths of the API groups that it serves.
        calls: in order: `VERB` or `VERB NAME`; the verb is that of RBAC, but `apply` for
            server-side apply; `list nodes` and `watch nodes` are of Nodes.
        watches: the query of each watch.
        readers: who may read Nodes, slices and claims: ``account``, and ``node`` by impersonation.
        dropped: fields of slices and their devices that are dropped, as by a feature gate.
        trouble: if set, answers everything.
        instead: by verb: what is answered in its place.
        events: by collection: what happened to its objects, with the versions that they had then.
        version: counts changes; the resourceVersion of the newest.
    """

    def __init__(self, node: str, *, uid: str = "") -> None:
        """Starts with a Node of this name and UID, whose kubelet supports DRA."""
        self.node = node
        self.objects: defaultdict[str, dict[str, Object]] = defaultdict(dict)
        self.slices = self.objects[SLICES]
        self.groups = {GROUP}
        self.calls: list[str] = []
        self.watches: list[dict[str, str]] = []
        self.readers = {"account"}
        self.dropped: set[str] = set()
        self.trouble: Reply | None = None
        self.instead: dict[str, Reply] = {}
        self.version: Feed[int] = Feed(100)
        self._oldest = 0
        """The version from which on the events are known."""
        self.events: defaultdict[str, list[tuple[int, Object]]] = defaultdict(list)
        self._conditions: set[str] = set()
        """The types of those that the agent has applied."""
        self._open: list[web.Request] = []
        self._muted: list[web.Request] = []
        self._ended: list[web.Request] = []
        self.objects[NODES][node] = {
            "kind": "Node",
            "metadata": {
                "name": node,
                "uid": uid or str(uuid4()),
                "resourceVersion": "1",
                "labels": {"kubernetes.io/hostname": node},
            },
            "status": {"nodeInfo": {"kubeletVersion": "v1.37.2"}},
        }

    @property
    def writes(self) -> list[str]:
        """The calls that would change something."""
        return [call for call in self.calls if call.startswith(_WRITES)]

    def devices(self) -> dict[str, Device]:
        """The devices of all slices by name, in the order of the slices."""
        return {
            device["name"]: device
            for _, slice_ in sorted(self.slices.items())
            for device in slice_["spec"].get("devices", ())
        }

    def taints(self) -> dict[str, list[Object]]:
        """The taints of each device that has some, by the device's name."""
        devices = self.devices().items()
        return {name: device["taints"] for name, device in devices if device.get("taints")}

    async def until(
        self, condition: Callable[[dict[str, Device]], bool], timeout: float
    ) -> dict[str, Device]:
        """Waits until `devices` are as `condition` wants them.

        Raises:
            TimeoutError: they were not within `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            await self.version.until(lambda _: condition(self.devices()))
        return self.devices()

    # --- what others do to it -------------------------------------------------------------------

    def allocate(
        self,
        driver: str,
        name: str,
        devices: Sequence[str],
        *,
        pod: str,
        namespace: str = "default",
        uid: str = "",
    ) -> ClaimRef:
        """A new claim that has these devices, reserved for the Pod.

        Whether they are free is not checked: a test can play a scheduler that is wrong.
        """
        ref = ClaimRef(namespace=namespace, name=name, uid=uid or str(uuid4()))
        results = [
            {"request": "npu", "driver": driver, "pool": self.node, "device": device}
            for device in devices
        ]
        self.claims(namespace)[name] = {
            "kind": "ResourceClaim",
            "metadata": {"namespace": namespace, "name": name, "uid": ref.uid},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": pod, "uid": str(uuid4())}],
            },
        }
        return ref

    def claims(self, namespace: str = "default") -> dict[str, Object]:
        """The claims of a namespace, by name."""
        return self.objects[f"{GROUP}/namespaces/{namespace}/resourceclaims"]

    def forget(self, ref: ClaimRef) -> None:
        """The claim is deleted, as it is with its Pod."""
        self.claims(ref.namespace).pop(ref.name, None)

    def put(self, name: str, **spec: Any) -> None:
        """Another client creates a slice, or changes these fields of its spec."""
        live = self.slices.get(name, {"metadata": {"name": name}, "spec": {}})
        event = "MODIFIED" if name in self.slices else "ADDED"
        self._put(event, SLICES, {**live, "spec": {**live["spec"], **spec}})

    def delete(self, *names: str) -> None:
        """Another client deletes these slices; without names all, as a kubelet that starts."""
        for name in names or list(self.slices):
            self._put("DELETED", SLICES, self.slices[name])

    def annotate(self, key: str, value: str | None) -> None:
        """Another client sets an annotation of the Node, or removes it."""
        live = self.objects[NODES][self.node]
        self._put("MODIFIED", NODES, _merged(live, {"metadata": {"annotations": {key: value}}}))

    def forget_events(self) -> None:
        """Makes all versions so far too old to watch from."""
        self._oldest = self._next()
        self.events.clear()

    def cut(self) -> None:
        """Breaks every watch."""
        for request in self._open:
            if request.transport:
                request.transport.close()

    def mute(self) -> None:
        """Silences all open watches from now on."""
        self._muted += self._open

    def end(self) -> None:
        """The time of every watch is over."""
        self._ended += self._open
        self._next()

    def bookmark(self) -> None:
        """Something else has happened, and the watches are given the latest version."""
        version = self.version.value + 1
        object_ = {"kind": "ResourceSlice", "metadata": {"resourceVersion": str(version)}}
        self.events[SLICES].append((version, {"type": "BOOKMARK", "object": object_}))
        self._next()

    def _next(self) -> int:
        self.version.publish(self.version.value + 1)
        return self.version.value

    # --- what it answers ------------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        verb = verb_of(request.method, request.path, request.query, request.content_type)
        _, _, name = request.path.rpartition("/")
        if request.path.endswith("/status"):
            name = "status"
        if request.path == NODES:
            verb += " nodes"
        plain = verb in ("list", "watch", "create", "list nodes", "watch nodes")
        self.calls.append(verb if plain else f"{verb} {name}")
        if reply := self.trouble or self.instead.get(verb) or self._refusal(verb, request):
            return await reply(request)
        if verb.startswith("watch"):
            return await self._watch(request)
        body = await request.json() if request.can_read_body else {}
        code, answer = self.act(verb.partition(" ")[0], request.path, body)
        if "PartialObjectMetadata" in request.headers.get("Accept", "") and code < 400:
            answer = {"kind": "PartialObjectMetadata", "metadata": answer["metadata"]}
        return web.json_response(answer, status=code)

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

    def act(self, verb: str, path: str, sent: Mapping[str, Any]) -> tuple[int, Object]:
        """The HTTP status and the object that answer a call; `path` is of it or its collection."""
        status = path.endswith("/status")
        parent, _, name = path.removesuffix("/status").rpartition("/")
        live = self.objects[parent].get(name)
        body: Object = copy.deepcopy(dict(sent))
        if path.startswith("/apis/") and not path.startswith(tuple(self.groups)):
            return 404, _failure(404, "the server could not find the requested resource")
        match verb:
            case "get" if path in self.groups:
                return 200, {"kind": "APIResourceList"}
            case "get" if live:
                return 200, live
            case "list":
                meta = {"resourceVersion": str(self.version.value)}
                items = list(self.objects[path].values())
                return 200, {"kind": f"{_KINDS[name]}List", "metadata": meta, "items": items}
            case "create" if body["metadata"]["name"] in self.objects[path]:
                return 409, _failure(409, f'"{body["metadata"]["name"]}" already exists')
            case "create":
                return 201, self._put("ADDED", path, body)
            case "patch" if live:
                version = body.get("metadata", {}).get("resourceVersion")
                if version not in (None, live["metadata"]["resourceVersion"]):
                    return 409, _failure(409, "the object has been modified")
                return 200, self._put("MODIFIED", parent, _merged(live, body))
            case "apply" if status and live:
                return 200, self._put("MODIFIED", parent, self._with_conditions(live, body))
            case "apply":
                return self._apply(parent, live or {"metadata": {"name": name}}, body)
            case "delete" if live:
                return 200, self._put("DELETED", parent, live)
        return 404, _failure(404, f'"{name}" not found')

    def _apply(self, collection: str, live: Object, sent: Object) -> tuple[int, Object]:
        """Server-side apply of labels, of owners and of a whole spec, as the agent."""
        meta, before = sent["metadata"], live["metadata"]
        if meta.get("uid", before.get("uid")) != before.get("uid"):
            return 409, _failure(409, "the UID in the precondition is that of another object")
        mine = applied(live)
        labels = {key: value for key, value in before.get("labels", {}).items() if key not in mine}
        labels |= meta.get("labels", {})
        stays = {key: value for key, value in before.items() if key != "ownerReferences"}
        object_ = self._kept({**live, **sent}, live)
        object_["metadata"] = {**stays, **meta, "managedFields": own(meta.get("labels", ()))}
        if labels:
            object_["metadata"]["labels"] = labels
        if object_ == live:  # what changes nothing is not written
            return 200, live
        return 200, self._put("MODIFIED" if "kind" in live else "ADDED", collection, object_)

    def _with_conditions(self, live: Object, sent: Object) -> Object:
        """The object after a server-side apply to its status, as the agent."""
        mine, status = self._conditions, live["status"]
        new = sent.get("status", {}).get("conditions", [])
        self._conditions = {condition["type"] for condition in new}
        gone = mine | self._conditions
        others = [kept for kept in status.get("conditions", ()) if kept["type"] not in gone]
        return {**live, "status": {**status, "conditions": [*others, *new]}}

    def _kept(self, sent: Object, live: Object) -> Object:
        """Returns a slice without the dropped fields.

        Counters are kept where there have been some (k8s.io/kubernetes, resourceslice/strategy.go,
        dropDisabledDRAPartitionableDevicesFields).
        """
        if "spec" not in sent:
            return sent
        before = live.get("spec", {})
        counted = "sharedCounters" in before or any(
            "consumesCounters" in device for device in before.get("devices", ())
        )
        off = self.dropped - (COUNTERS if counted else set())
        spec = {key: value for key, value in sent["spec"].items() if value != [] and key not in off}
        # A second a version, so that no two writes are at the same time.
        now = datetime.fromtimestamp(self.version.value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for device in spec.get("devices", ()):
            for field in off:
                device.pop(field, None)
            for taint in device.get("taints", ()):
                taint.setdefault("timeAdded", now)
        return {**sent, "spec": spec}

    def _put(self, event: str, collection: str, object_: Object) -> Object:
        name = object_["metadata"]["name"]
        version = self.version.value + 1
        meta = {**object_["metadata"], "resourceVersion": str(version)}
        stored = {**object_, "kind": _KINDS[collection.rpartition("/")[2]], "metadata": meta}
        if event == "DELETED":
            del self.objects[collection][name]
        else:
            self.objects[collection][name] = stored
        self.events[collection].append((version, {"type": event, "object": stored}))
        self._next()
        return stored

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Yields events of slices, or the Node, after a version, until the time is over.

        A watch from version 0 begins with what there is.
        """
        if request.path == SLICES:
            self.watches.append(dict(request.query))
        seen = int(request.query["resourceVersion"])
        first = () if seen else tuple(self.objects[request.path].values())
        seen = seen or self.version.value
        if seen < self._oldest:
            return await status(410, "too old resource version")(request)
        response = web.StreamResponse()
        await response.prepare(request)
        self._open.append(request)
        for object_ in first:
            await response.write(json.dumps({"type": "ADDED", "object": object_}).encode() + b"\n")
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                async for _ in self.version.watch():
                    if request in self._ended:
                        break
                    for version, event in list(self.events[request.path]):
                        if version > seen and request not in self._muted:
                            seen = version
                            await response.write(json.dumps(event).encode() + b"\n")
        except TimeoutError:
            pass
        finally:
            self._open.remove(request)
        return response


def verb_of(method: str, path: str, query: Mapping[str, str], content_type: str) -> str:
    """Returns the verb of a request; see `StandInApiServer.calls`."""
    match method:
        case "POST":
            return "create"
        case "PATCH":
            return "apply" if content_type == "application/apply-patch+yaml" else "patch"
        case "GET" if "watch" in query:
            return "watch"
        case "GET" if path.rpartition("/")[2] in _KINDS:
            return "list"
    return method.lower()


def own(labels: Iterable[str], manager: str = "npu-agent") -> list[Object]:
    """ManagedFields that say who applied these labels."""
    fields: Object = {"f:metadata": {"f:labels": {f"f:{key}": {} for key in labels}}}
    return [{"manager": manager, "operation": "Apply", "fieldsV1": fields}]


def applied(object_: Object) -> frozenset[str]:
    """The labels that the agent has applied, by managedFields."""
    return frozenset(
        key.removeprefix("f:")
        for entry in object_["metadata"].get("managedFields", ())
        if entry["manager"] == "npu-agent"
        for key in entry["fieldsV1"]["f:metadata"]["f:labels"]
    )


def _merged(live: Any, patch: Any) -> Any:
    """A merge patch, as RFC 7386 has it."""
    if not isinstance(patch, dict):
        return patch
    live = live if isinstance(live, dict) else {}
    merged = {key: _merged(live.get(key), value) for key, value in patch.items()}
    return {key: value for key, value in {**live, **merged}.items() if value is not None}


def _failure(code: int, message: str) -> Object:
    return {"kind": "Status", "status": "Failure", "message": message, "code": code}
