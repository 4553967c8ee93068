"""A node on which all is well, made of simulated cards and stand-ins, for tests that break it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_agent import simulator
from npu_agent.config import MetricsConfig, default_config
from npu_agent.config.resources import resources_of
from npu_agent.core.offer import advertise
from npu_agent.doctor.check import Check
from npu_agent.doctor.examine import examine
from npu_agent.doctor.situation import Situation
from npu_agent.inventory.inventory import read_once
from npu_agent.kubelet.ownership import lock_path
from npu_agent.kubelet.pods import CHECKPOINT
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.outputs.labels import compute
from npu_agent.outputs.labels.machine import read_machine
from npu_agent.simulator.kubelet import StandInKubelet
from npu_agent.vendors import REGISTRY
from npu_agent.vendors.furiosa.labels import SETS
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.kube.helpers import kubeconfig, serving
from tests.outputs.deviceplugin.helpers import short_directory

POD = "npu-agent-7xk2p"
NODE_NAME = "n1"
RESOURCE = "beta.furiosa.ai/npu"
RIGHTS = {("get", "nodes"), ("patch", "nodes"), ("create", "events"), ("patch", "events")}

RNGD = {"name": "npu-0", "attributes": {"arch": {"string": "rngd"}, "cores": {"int": 8}}}
"""A device in a ResourceSlice."""

STATUS = """\
Name:\tnpu-agent
CapInh:\t0000000000000000
CapEff:\t0000000000000000
NoNewPrivs:\t1
Seccomp:\t2
"""


@dataclass
class Dra:
    """What the API server has of resource.k8s.io/v1, and what is to be wrong with it."""

    served: bool = True
    denied: set[tuple[str, str]] = field(default_factory=set)
    slices: dict[str, int] = field(default_factory=lambda: {"00000-npu.furiosa.ai-n1": 2})
    """By name, how many devices each has."""
    keeps_taints: bool = True
    keeps_counters: bool = True
    device_class: int = 200
    """The HTTP status of its answer."""
    classes: list[dict[str, Any]] | int = field(default_factory=list)
    """All DeviceClasses, or the HTTP status of the answer."""
    policy: str | None = "npu-agent-own-slices"
    """The one that refuses slices of other nodes."""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        what = request.path.removeprefix("/apis/resource.k8s.io/v1")
        if not self.served:
            return _status(404, "the server could not find the requested resource")
        if not what:
            return web.json_response({"kind": "APIResourceList"})
        if what == "/deviceclasses":
            if isinstance(self.classes, int):
                return _status(self.classes, "deviceclasses cannot be listed")
            return web.json_response({"kind": "DeviceClassList", "items": self.classes})
        if what.startswith("/deviceclasses/"):
            if self.device_class == 200:
                return web.json_response({"kind": "DeviceClass"})
            return _status(self.device_class, 'deviceclasses "npu.furiosa.ai" cannot be read')
        assert what == "/resourceslices"
        if request.method == "GET":
            pool = {"name": NODE_NAME, "generation": 1, "resourceSliceCount": len(self.slices)}
            items = [
                {"metadata": {"name": name}, "spec": {"pool": pool, "devices": [RNGD] * count}}
                for name, count in self.slices.items()
            ]
            found = {"kind": "ResourceSliceList", "metadata": {"resourceVersion": "1"}}
            return web.json_response({**found, "items": items})
        assert request.method == "POST"
        assert request.query["dryRun"] == "All"
        sent = await request.json()
        if self.policy and sent["spec"]["nodeName"] != NODE_NAME:
            return _status(403, f"ValidatingAdmissionPolicy '{self.policy}' denied request: no")
        if not self.keeps_taints:
            for device in sent["spec"]["devices"]:
                del device["taints"]
        if not self.keeps_counters:
            sent["spec"].pop("sharedCounters", None)
            for device in sent["spec"].get("devices", ()):
                device.pop("consumesCounters", None)
        return web.json_response(sent, status=201)


@dataclass
class ApiServer:
    """Answers as an API server with one Node; what it says may be changed at any time."""

    node: dict[str, Any]
    rights: set[tuple[str, str]] = field(default_factory=lambda: set(RIGHTS))
    asked: list[str] = field(default_factory=list)
    dra: Dra = field(default_factory=Dra)
    refusal: int = 0
    """If set, the HTTP status of every answer."""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        if self.refusal:
            return _status(self.refusal, "no")
        if request.path.endswith("/selfsubjectaccessreviews"):
            review = await request.json()
            asked = review["spec"]["resourceAttributes"]
            # As RBAC does: a right to Events of one namespace is none to those of another.
            if asked["group"] == "resource.k8s.io":
                allowed = (asked["verb"], asked["resource"]) not in self.dra.denied
                return web.json_response({**review, "status": {"allowed": allowed}}, status=201)
            groups = {
                "tokenreviews": "authentication.k8s.io",
                "subjectaccessreviews": "authorization.k8s.io",
            }
            assert asked["group"] == groups.get(asked["resource"], "")
            assert asked.get("namespace", "") == {"events": "default"}.get(asked["resource"], "")
            allowed = (asked["verb"], asked["resource"]) in self.rights
            return web.json_response({**review, "status": {"allowed": allowed}}, status=201)
        if request.path.startswith("/apis/resource.k8s.io/v1"):
            return await self.dra(request)
        name = request.path.rpartition("/")[2]
        if request.method == "GET" and ("get", "nodes") not in self.rights:
            return _status(403, f'nodes "{name}" is forbidden: User "x" cannot get resource')
        if request.method == "GET" and name == self.node["metadata"]["name"]:
            return web.json_response(self.node)
        return _status(404, f'"{name}" not found')


def _status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}
    return web.json_response({**body, "code": code}, status=code)


@dataclass
class Port:
    """What answers at an address of the agent; `words` and `reasons` may be changed at any time."""

    number: int = 0
    words: str = "ok\n"
    reasons: list[str] = field(default_factory=list)
    served: asyncio.Server | None = None
    answering: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self.served = await asyncio.start_server(self._answer, "127.0.0.1", self.number)
        self.number = self.served.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self.served:
            self.served.close()
        self.served = None
        for task in self.answering:  # who only looks whether somebody listens sends nothing
            task.cancel()
        await asyncio.gather(*self.answering, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self.answering.add(task)
        task.add_done_callback(self.answering.discard)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._say(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _say(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body, code = self.words, 200
        if head.startswith(b"GET /readyz "):
            body = json.dumps({"ready": not self.reasons, "reasons": self.reasons})
            code = 503 if self.reasons else 200
        writer.write(f"HTTP/1.1 {code} X\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()


@dataclass
class Node:
    """All of it; tests take it apart."""

    root: Path
    situation: Situation
    kubelet: StandInKubelet
    api: ApiServer
    port: Port
    """At metrics.probes."""
    pages: Port
    """At metrics.listen."""
    registered: dict[str, list[str]]
    proc: Path
    lock: ExitStack
    """Closed, it lets go of the agent's lock."""
    plugins: list[UnixServer] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.situation.directory

    async def examined(self) -> dict[str, Check]:
        """The lines by name; each name once, but for the reasons of readiness."""
        found = {check.name: check for check in await examine(self.situation)}
        assert not [each for each in found.values() if each.detail.startswith("internal error")]
        return found

    def write_checkpoint(self) -> None:
        write_checkpoint(self.directory, self.registered)

    async def serve_plugin(self, name: str) -> None:
        """A device plugin of somebody, on a socket of this name."""
        server = UnixServer([_Plugin()], self.directory / name)
        await server.listen()
        self.plugins.append(server)

    def reconfigure(self, **values: Any) -> None:
        self.situation = replace(self.situation, config=replace(self.situation.config, **values))


class _Plugin(wire.DevicePluginBase):
    async def get_device_plugin_options(self, _: wire.Empty) -> wire.DevicePluginOptions:
        return wire.DevicePluginOptions()


def write_checkpoint(directory: Path, registered: dict[str, list[str]]) -> None:
    """As the kubelet's device manager does."""
    data = {"PodDeviceEntries": None, "RegisteredDevices": registered}
    (directory / CHECKPOINT).write_text(json.dumps({"Data": data, "Checksum": 1}))


def unserved(path: Path) -> None:
    """Leaves a socket behind as a process does that was killed."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@contextmanager
def locked(directory: Path, host: str = POD) -> Iterator[int]:
    """Holds the lock as an agent on `host` does."""
    descriptor = os.open(lock_path(directory), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        who = {"host": host, "pid": 1, "version": "0.1.0", "since": "2026-11-21T00:00:00Z"}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(who).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@asynccontextmanager
async def good_node(
    monkeypatch: pytest.MonkeyPatch, cards: str = "warboy=1,rngd=1"
) -> AsyncIterator[Node]:
    """The agent's Pod on a node where nothing is wrong."""
    with short_directory() as base:
        root, directory, proc = base / "host", base / "device-plugins", base / "proc"
        directory.mkdir()
        (proc / "self").mkdir(parents=True)
        (proc / "net").symlink_to("/proc/net")
        (proc / "self/status").write_text(STATUS)
        # The last one mounted at a place is what is seen there.
        (proc / "self/mounts").write_text(
            "rootfs / rootfs rw 0 0\noverlay / overlay ro,relatime 0 0\n"
        )
        simulator.make(root, simulator.parse_cards(cards), plain_nodes=True)
        (root / "sys/fs/cgroup").mkdir(parents=True)
        snapshot = await read_once([Furiosa(root)])
        (resource,) = resources_of(default_config(REGISTRY), REGISTRY.core_counts)
        ids = [device.id for device in advertise(snapshot, resource)]
        registered = {RESOURCE: ids, "nvidia.com/gpu": ["GPU-1"]}
        write_checkpoint(directory, registered)
        labels = compute.labels(snapshot, read_machine(root), [SETS["beta"]])
        api = ApiServer(_node(labels, len(ids)))
        port, pages = Port(), Port()
        await port.start()
        await pages.start()
        kubelet = StandInKubelet(directory, base / "pod-resources")
        await kubelet.start()
        try:
            with ExitStack() as lock:
                lock.enter_context(locked(directory))
                async with serving(api) as server:
                    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(base, server.url)))
                    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
                    node = Node(
                        root=root,
                        situation=Situation(
                            config=replace(
                                default_config(REGISTRY),
                                plugin_dir=str(directory),
                                metrics=MetricsConfig(
                                    listen=f"127.0.0.1:{pages.number}",
                                    probes=f"127.0.0.1:{port.number}",
                                ),
                            ),
                            host_root=root,
                            vendors=(Furiosa(root),),
                            node_name=NODE_NAME,
                            in_pod=True,
                            uid=0,
                            hostname=POD,
                            proc=proc,
                            agent_config=base / "config.yaml",
                        ),
                        kubelet=kubelet,
                        api=api,
                        port=port,
                        pages=pages,
                        registered=registered,
                        proc=proc,
                        lock=lock,
                    )
                    await node.serve_plugin("furiosa-npu-0123abcd.sock")
                    await node.serve_plugin("nvidia-gpu.sock")
                    yield node
                    for plugin in node.plugins:
                        await plugin.shutdown()
        finally:
            await port.stop()
            await pages.stop()
            await kubelet.stop()


def _node(labels: dict[str, str], devices: int) -> dict[str, Any]:
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {
            "name": NODE_NAME,
            "uid": "7b0c",
            "resourceVersion": "42",
            "labels": {"kubernetes.io/hostname": NODE_NAME, **labels},
            "managedFields": [_owned("npu-agent", list(labels))],
        },
        "spec": {},
        "status": {
            "allocatable": {"cpu": "8", RESOURCE: str(devices)},
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"kubeletVersion": "v1.36.3"},
        },
    }


def _owned(manager: str, keys: list[str]) -> dict[str, Any]:
    return {
        "manager": manager,
        "operation": "Apply",
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:metadata": {"f:labels": {f"f:{key}": {} for key in keys}}},
    }


def own(node: Node, manager: str) -> None:
    """Makes `manager` the owner of all our labels."""
    keys = [key for key in node.api.node["metadata"]["labels"] if "furiosa" in key]
    node.api.node["metadata"]["managedFields"] = [_owned(manager, keys)]
