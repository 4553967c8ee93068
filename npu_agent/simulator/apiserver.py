"""A stand-in for the API server, as far as a DRA driver asks it, for the demo and for benchmarks.

One Node, its ResourceSlices, and ResourceClaims that are allocated by whoever holds the stand-in,
in the scheduler's place. What it cannot show is tested on a real API server (tests/e2e).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from npu_agent.core.claim import ClaimRef
from npu_agent.feed import Feed

if TYPE_CHECKING:
    from aiohttp import web

_API = "resource.k8s.io/v1"
_CLOSING = 0.1
"""Seconds for requests to end by themselves."""

Slices = Mapping[str, Mapping[str, Any]]
"""ResourceSlices by name."""
Taint = tuple[str, str]
"""Key and effect."""


class StandInApiServer:
    """Has a Node of this name; `slices` is what was applied, `requests` counts by method."""

    def __init__(self, node: str) -> None:
        """Serves nothing yet."""
        self.slices: Feed[Slices] = Feed(MappingProxyType({}))
        self.requests: Counter[str] = Counter()
        self.url = ""
        self._node = node
        self._node_uid = str(uuid4())
        self._claims: dict[tuple[str, str], dict[str, Any]] = {}
        self._version: Feed[int] = Feed(1)
        self._events: list[tuple[int, dict[str, Any]]] = []
        """What happened to the slices, with the version that they had then."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Serves plain HTTP on a free port of this host."""
        from aiohttp import web

        app = web.Application(client_max_size=2**21)
        app.router.add_route("*", "/{path:.*}", self.answer)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=_CLOSING, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Closes every connection."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    def devices(self) -> dict[str, tuple[Taint, ...]]:
        """The devices of all slices by name, each with its taints, as the scheduler sees them."""
        return {
            device["name"]: tuple((one["key"], one["effect"]) for one in device.get("taints", ()))
            for _, each in sorted(self.slices.value.items())
            for device in each["spec"].get("devices", ())
        }

    async def until(
        self, condition: Callable[[dict[str, tuple[Taint, ...]]], bool], timeout: float
    ) -> dict[str, tuple[Taint, ...]]:
        """Waits until `devices` are as `condition` wants them.

        Raises:
            TimeoutError: they were not within `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            await self.slices.until(lambda _: condition(self.devices()))
        return self.devices()

    def allocate(self, driver: str, name: str, devices: Sequence[str], *, pod: str) -> ClaimRef:
        """A new claim of the namespace ``default`` that has these devices, reserved for the Pod.

        Nobody checks whether they are free: a scheduler that is wrong about it can be played too.
        """
        ref = ClaimRef(namespace="default", name=name, uid=str(uuid4()))
        results = [
            {"request": "npu", "driver": driver, "pool": self._node, "device": device}
            for device in devices
        ]
        self._claims[ref.namespace, ref.name] = {
            "apiVersion": _API,
            "kind": "ResourceClaim",
            "metadata": {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": pod, "uid": str(uuid4())}],
            },
        }
        return ref

    def forget(self, ref: ClaimRef) -> None:
        """The claim is deleted, as it is with its Pod."""
        self._claims.pop((ref.namespace, ref.name), None)

    def delete(self, name: str) -> None:
        """Somebody deletes this slice."""
        self._put("DELETED", name, self.slices.value[name])

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        self.requests[request.method] += 1
        match request.method, *request.path.strip("/").split("/"):
            case "GET", "api", "v1", "nodes", name if name == self._node:
                meta = {"name": name, "uid": self._node_uid, "resourceVersion": "1"}
                if "PartialObjectMetadata" in request.headers.get("Accept", ""):
                    return _says({"kind": "PartialObjectMetadata", "metadata": meta})
                status = {"nodeInfo": {"kubeletVersion": "v1.36.3"}}
                return _says({"kind": "Node", "metadata": meta, "status": status})
            case "GET", "apis", "resource.k8s.io", "v1":
                return _says({"kind": "APIResourceList"})
            case (
                "GET",
                "apis",
                "resource.k8s.io",
                "v1",
                "namespaces",
                space,
                "resourceclaims",
                name,
            ):
                return _says(self._claims.get((space, name)))
            case "GET", "apis", "resource.k8s.io", "v1", "resourceslices":
                if "watch" in request.query:
                    return await self._watch(request)
                meta = {"resourceVersion": str(self._version.value)}
                items = list(self.slices.value.values())
                return _says({"kind": "ResourceSliceList", "metadata": meta, "items": items})
            case "POST", "apis", "resource.k8s.io", "v1", "resourceslices" if (
                request.query.get("dryRun") == "All"
            ):
                return _says(await request.json())
            case "PATCH", "apis", "resource.k8s.io", "v1", "resourceslices", name:
                return _says(self._apply(name, await request.json()))
            case "DELETE", "apis", "resource.k8s.io", "v1", "resourceslices", name:
                found = self.slices.value.get(name)
                if found:
                    self.delete(name)
                return _says(found)
        return _says(None)

    def _apply(self, name: str, sent: dict[str, Any]) -> Mapping[str, Any]:
        """As server-side apply does it: what changes nothing is not written."""
        live = self.slices.value.get(name)
        for device in sent["spec"].get("devices", ()):
            for taint in device.get("taints", ()):
                taint.setdefault("timeAdded", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        owners = sent["metadata"].get("ownerReferences")
        if live and (live["spec"], live["metadata"].get("ownerReferences")) == (
            sent["spec"],
            owners,
        ):
            return live
        return self._put("MODIFIED" if live else "ADDED", name, sent)

    def _put(self, event: str, name: str, slice_: Mapping[str, Any]) -> Mapping[str, Any]:
        version = self._version.value + 1
        meta = {**slice_["metadata"], "resourceVersion": str(version)}
        found = {**slice_, "kind": "ResourceSlice", "metadata": meta}
        others = {key: value for key, value in self.slices.value.items() if key != name}
        self._events.append((version, {"type": event, "object": found}))
        self.slices.publish(others if event == "DELETED" else {**others, name: found})
        self._version.publish(version)
        return found

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """What happens after a version, until the request's time is over."""
        from aiohttp import web

        response = web.StreamResponse()
        await response.prepare(request)
        seen = int(request.query["resourceVersion"])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                async for _ in self._version.watch():
                    for version, event in list(self._events):
                        if version > seen:
                            seen = version
                            await response.write(json.dumps(event).encode() + b"\n")
        return response


def _says(found: Mapping[str, Any] | None) -> web.Response:
    from aiohttp import web

    if found is None:
        status = {"kind": "Status", "status": "Failure", "code": 404, "message": "not found"}
        return web.json_response(status, status=404)
    return web.json_response(found)
