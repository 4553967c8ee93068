"""An API server that has ResourceSlices and a Node, for tests of who writes them.

As far as they go it does what the real one does, which tests/e2e/test_dra_slices.py shows.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from npu_agent.kube import Api
from tests.kube.helpers import Reply, drops, kubeconfig, says, serving, status

NODE = "n1"
DRIVER = "npu.furiosa.ai"
COUNTERS = {"sharedCounters", "consumesCounters"}
"""What an API server without DRAPartitionableDevices drops."""


class SlicesApi:
    """The server's state; what happens to it is written to `calls`."""

    def __init__(self, node: str = NODE) -> None:
        self.node = node
        self.slices: dict[str, dict[str, Any]] = {}
        self.node_uid: str | None = "uid-1"
        self.calls: list[str] = []
        """In order: ``list``, ``watch``, ``node``, ``try``, ``apply NAME`` and ``delete NAME``."""
        self.pools: list[tuple[int, ...]] = []
        """After each write: how many slices of the highest generation there are, and should be."""
        self.gates_off: set[str] = set()
        """Fields of devices, or of slices, that are dropped."""
        self.instead: dict[str, Reply] = {}
        """By the first word of a call: what is answered in its place."""
        self.away = False
        """Whether every connection is closed without an answer."""
        self.watches: list[dict[str, str]] = []
        """The query of each watch."""
        self._version = 100
        self._oldest = 0
        """The version from which on the events are known."""
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._stirred = asyncio.Event()
        self._open: list[web.Request] = []
        self._muted: list[web.Request] = []
        self._ended: list[web.Request] = []

    @property
    def writes(self) -> list[str]:
        return [call for call in self.calls if call.startswith(("apply", "delete"))]

    def count(self, call: str) -> int:
        return self.calls.count(call)

    @property
    def devices(self) -> list[str]:
        """The names of all devices, in the order of the slices."""
        return [device["name"] for device in self.found]

    @property
    def taints(self) -> dict[str, list[dict[str, Any]]]:
        """By the device's name."""
        return {each["name"]: each["taints"] for each in self.found if each.get("taints")}

    @property
    def found(self) -> list[dict[str, Any]]:
        """All devices, in the order of the slices."""
        return [
            device
            for _, each in sorted(self.slices.items())
            for device in each["spec"].get("devices", ())
        ]

    # --- what others do to it -------------------------------------------------------------------

    def delete(self, name: str) -> None:
        self._put("DELETED", name, self.slices.pop(name))

    def delete_all(self) -> None:
        for name in list(self.slices):
            self.delete(name)

    def edit(self, name: str, **spec: Any) -> None:
        changed = copy.deepcopy(self.slices[name])
        changed["spec"].update(spec)
        self._put("MODIFIED", name, changed)

    def add(self, name: str, spec: dict[str, Any]) -> None:
        self._put("ADDED", name, {"metadata": {"name": name}, "spec": spec})

    def forget_events(self) -> None:
        """The versions of before now are too old to be watched from."""
        self._version += 1
        self._oldest = self._version
        self._events.clear()

    def cut(self) -> None:
        """Breaks every watch."""
        for request in self._open:
            if request.transport:
                request.transport.close()

    def mute(self) -> None:
        """No watch that is open says anything from now on."""
        self._muted += self._open

    def end(self) -> None:
        """The time of every watch is over."""
        self._ended += self._open
        self._stir()

    def bookmark(self) -> None:
        """Something else has happened, and the watches are given the version of now."""
        self._version += 1
        meta = {"resourceVersion": str(self._version)}
        object_ = {"kind": "ResourceSlice", "metadata": meta, "spec": {}}
        self._events.append((self._version, {"type": "BOOKMARK", "object": object_}))
        self._stir()

    def _put(self, type_: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        meta = {**found["metadata"], "resourceVersion": str(self._version)}
        found = {"kind": "ResourceSlice", **found, "metadata": meta}
        if type_ != "DELETED":
            self.slices[name] = found
        self._events.append((self._version, {"type": type_, "object": found}))
        self._stir()
        return found

    def _stir(self) -> None:
        self._stirred.set()
        self._stirred = asyncio.Event()

    # --- what it answers ------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["path"].rpartition("/")[2]
        if request.path.startswith("/api/v1/nodes/"):
            call = "node"
        elif request.method == "POST":
            call = "try"
        elif request.method == "GET":
            call = "watch" if "watch" in request.query else "list"
        else:
            call = f"{'apply' if request.method == 'PATCH' else 'delete'} {name}"
        self.calls.append(call)
        if self.away:
            return await drops(request)
        if reply := self.instead.get(call.partition(" ")[0]):
            return await reply(request)
        if call == "node":
            return await self._node(request)
        if call == "try":
            assert request.query == {"dryRun": "All"}
            sent = await request.json()
            return await says({**sent, "spec": self._kept(sent["spec"], None)})(request)
        if request.method == "GET":
            ours = f"spec.nodeName={self.node},spec.driver={DRIVER}"
            assert request.query["fieldSelector"] == ours
            if call == "watch":
                return await self._watch(request)
            meta = {"resourceVersion": str(self._version)}
            items = list(self.slices.values())
            return await says({"kind": "ResourceSliceList", "metadata": meta, "items": items})(
                request
            )
        reply = await self._apply(request) if call.startswith("apply") else self._delete(name)
        self._note_pool()
        return await reply(request)

    async def _node(self, request: web.Request) -> web.StreamResponse:
        if self.node_uid is None:
            return await status(404, f'nodes "{self.node}" not found')(request)
        meta = {"name": self.node, "uid": self.node_uid, "resourceVersion": "1"}
        return await says({"kind": "PartialObjectMetadata", "metadata": meta})(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches.append(dict(request.query))
        at = int(request.query["resourceVersion"])
        if at < self._oldest:
            return await status(410, "too old resource version")(request)
        response = web.StreamResponse()
        await response.prepare(request)
        self._open.append(request)
        try:
            while request not in self._ended:
                stirred = self._stirred
                for version, event in list(self._events):
                    if version > at and request not in self._muted:
                        at = version
                        await response.write(json.dumps(event).encode() + b"\n")
                await stirred.wait()
        finally:
            self._open.remove(request)
        return response

    async def _apply(self, request: web.Request) -> Reply:
        assert request.query == {"fieldManager": "npu-agent", "force": "true"}
        sent = await request.json()
        name = sent["metadata"]["name"]
        live = self.slices.get(name)
        spec = self._kept(sent["spec"], live)
        found = {**sent, "spec": spec}
        same = live and live["spec"] == spec and owners(live) == owners(found)
        if not same:
            live = self._put("MODIFIED" if live else "ADDED", name, found)
        return says(live)

    def _kept(self, sent: dict[str, Any], live: dict[str, Any] | None) -> dict[str, Any]:
        """What there is of a slice without the fields that are dropped: counters are kept where
        there have been some (strategy.go, dropDisabledDRAPartitionableDevicesFields)."""
        before = live["spec"] if live else {}
        counted = "sharedCounters" in before or any(
            "consumesCounters" in device for device in before.get("devices", ())
        )
        off = self.gates_off - (COUNTERS if counted else set())
        spec = {key: value for key, value in sent.items() if value != [] and key not in off}
        for device in spec.get("devices", ()):
            for field in off:
                device.pop(field, None)
            for taint in device.get("taints", ()):
                taint.setdefault("timeAdded", f"now-{self._version}")
        return spec

    def _delete(self, name: str) -> Reply:
        if name not in self.slices:
            return status(404, f'resourceslices "{name}" not found')
        found = self.slices[name]
        self.delete(name)
        return says(found)

    def _note_pool(self) -> None:
        pools = [each["spec"]["pool"] for each in self.slices.values()]
        newest = max((pool["generation"] for pool in pools), default=0)
        counts = [p["resourceSliceCount"] for p in pools if p["generation"] == newest]
        self.pools.append((len(counts), *sorted(set(counts))))


def owners(found: dict[str, Any]) -> object:
    return found["metadata"].get("ownerReferences")


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[tuple[SlicesApi, Api]]:
    """The server, and a client of it."""
    state = SlicesApi()
    async with serving(state.handle) as server:
        api = Api(kubeconfig=kubeconfig(directory, server.url), deadline=2.0)
        try:
            yield state, api
        finally:
            await api.close()
