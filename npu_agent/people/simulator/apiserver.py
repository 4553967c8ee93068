"""A stand-in for the API server, for the demo.

It keeps objects by their paths and does with them what the agent of one node asks for: get, list,
watch, merge patch, server-side apply, delete. Tests make one of it that fails
(tests/kube/apiserver.py); what neither can show is tested on a real API server (tests/e2e).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from aiohttp import web

from npu_agent.core.pool import ClaimRef
from npu_agent.feed import Feed

NODES = "/api/v1/nodes"
GROUP = "/apis/resource.k8s.io/v1"
SLICES = f"{GROUP}/resourceslices"
_LISTS = {NODES: "NodeList", SLICES: "ResourceSliceList"}
_CLOSING = 0.1
"""Seconds for requests to end by themselves."""

Object = dict[str, Any]
Device = Mapping[str, Any]
"""A device of a ResourceSlice."""


@contextlib.asynccontextmanager
async def served(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
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
        events: by collection: what happened to its objects, with the versions that they had then.
        version: counts changes; the resourceVersion of the newest.
    """

    def __init__(self, node: str) -> None:
        """Starts with a Node of this name, whose kubelet supports DRA."""
        self.node = node
        self.objects: defaultdict[str, dict[str, Object]] = defaultdict(dict)
        self.slices = self.objects[SLICES]
        self.events: defaultdict[str, list[tuple[int, Object]]] = defaultdict(list)
        self.version: Feed[int] = Feed(100)
        self._conditions: set[str] = set()
        """The types of those that the agent has applied."""
        self.objects[NODES][node] = {
            "kind": "Node",
            "metadata": {
                "name": node,
                "uid": str(uuid4()),
                "resourceVersion": "1",
                "labels": {"kubernetes.io/hostname": node},
            },
            "status": {"nodeInfo": {"kubeletVersion": "v1.37.2"}},
        }

    def devices(self) -> dict[str, Device]:
        """The devices of all slices by name, in the order of the slices."""
        return {
            device["name"]: device
            for _, slice_ in sorted(self.slices.items())
            for device in slice_["spec"].get("devices", ())
        }

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

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        verb = verb_of(request)
        if verb == "watch":
            stream = web.StreamResponse()
            await stream.prepare(request)
            await self.watch(request, stream)
            return stream
        body = await request.json() if request.can_read_body else {}
        code, answer = self.act(verb, request.path, body)
        if "PartialObjectMetadata" in request.headers.get("Accept", "") and code < 400:
            answer = {"kind": "PartialObjectMetadata", "metadata": answer["metadata"]}
        return web.json_response(answer, status=code)

    def act(self, verb: str, path: str, body: Object) -> tuple[int, Object]:
        """The HTTP status and the object that answer a call; `path` is of it or its collection."""
        collection, _, name = path.removesuffix("/status").rpartition("/")
        live = self.objects[collection].get(name)
        match verb:
            case "get" if path == GROUP:
                return 200, {"kind": "APIResourceList"}
            case "get" if live:
                return 200, live
            case "list":
                meta = {"resourceVersion": str(self.version.value)}
                items = list(self.objects[path].values())
                return 200, {"kind": _LISTS[path], "metadata": meta, "items": items}
            case "patch" if live:
                version = body.get("metadata", {}).get("resourceVersion")
                if version not in (None, live["metadata"]["resourceVersion"]):
                    return 409, _failure(409, "the object has been modified")
                return 200, self.store("MODIFIED", collection, _merged(live, body))
            case "apply" if path.endswith("/status") and live:
                return 200, self.store("MODIFIED", collection, self._with_conditions(live, body))
            case "apply":
                return self.apply(collection, live or {}, body)
            case "delete" if live:
                return 200, self.store("DELETED", collection, live)
        return 404, _failure(404, f'"{name}" not found')

    def apply(self, collection: str, live: Object, body: Object) -> tuple[int, Object]:
        """Server-side apply of a whole spec, as the agent; `live` is {} if there is none yet."""
        meta = {**live.get("metadata", {}), **body["metadata"]}
        event = "MODIFIED" if live else "ADDED"
        return 200, self.store(event, collection, {**live, **body, "metadata": meta})

    def store(self, event: str, collection: str, object_: Object) -> Object:
        """Keeps an object as a new version, or deletes it; the watches are given the event."""
        name = object_["metadata"]["name"]
        version = self.version.value + 1
        stored = {**object_, "metadata": {**object_["metadata"], "resourceVersion": str(version)}}
        if event == "DELETED":
            del self.objects[collection][name]
        else:
            self.objects[collection][name] = stored
        self.events[collection].append((version, {"type": event, "object": stored}))
        self.version.publish(version)
        return stored

    def _with_conditions(self, live: Object, body: Object) -> Object:
        """The object after a server-side apply to its status, as the agent."""
        mine = self._conditions
        status = live["status"]
        new = body.get("status", {}).get("conditions", [])
        self._conditions = {condition["type"] for condition in new}
        gone = mine | self._conditions
        others = [kept for kept in status.get("conditions", ()) if kept["type"] not in gone]
        return {**live, "status": {**status, "conditions": [*others, *new]}}

    async def watch(self, request: web.Request, stream: web.StreamResponse) -> None:
        """Writes the events of a collection after a version, until the time is over.

        A watch from version 0 begins with what there is.
        """
        seen = int(request.query["resourceVersion"])
        first = () if seen else tuple(self.objects[request.path].values())
        seen = seen or self.version.value
        for object_ in first:
            await stream.write(_line({"type": "ADDED", "object": object_}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                async for _ in self.version.watch():
                    for version, event in list(self.events[request.path]):
                        if version > seen:
                            seen = version
                            await stream.write(_line(event))


def verb_of(request: web.Request) -> str:
    """The verb of RBAC, but `apply` for server-side apply."""
    match request.method:
        case "POST":
            return "create"
        case "PATCH":
            server_side = request.content_type == "application/apply-patch+yaml"
            return "apply" if server_side else "patch"
        case "GET" if "watch" in request.query:
            return "watch"
        case "GET" if request.path in _LISTS:
            return "list"
    return request.method.lower()


def _line(event: Object) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _merged(live: Any, patch: Any) -> Any:
    """A merge patch, as RFC 7386 has it."""
    if not isinstance(patch, dict):
        return patch
    live = live if isinstance(live, dict) else {}
    merged = {key: _merged(live.get(key), value) for key, value in patch.items()}
    return {key: value for key, value in {**live, **merged}.items() if value is not None}


def _failure(code: int, message: str) -> Object:
    return {"kind": "Status", "status": "Failure", "message": message, "code": code}
