"""A node on which all is well, made of simulated cards and stand-ins, for tests that break it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_agent.config import MetricsConfig, default_config
from npu_agent.kubelet.lock import lock_path
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.people import simulator
from npu_agent.people.commands.doctor import examine
from npu_agent.people.doctor.check import Check, CheckTiming, Context, State
from npu_agent.people.simulator.apiserver import NODES
from npu_agent.people.simulator.kubelet import StandInKubelet
from npu_agent.vendors import SPEC
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.kube.apiserver import FaultyApiServer
from tests.kube.helpers import kubeconfig, serving, status
from tests.outputs.deviceplugin.helpers import short_directory

NODE_NAME = "n1"
RESOURCE = "beta.furiosa.ai/npu"
POD = Context(
    config=default_config(SPEC),
    host_root=Path("/host"),
    vendor=Furiosa(Path("/host")),
    node_name=NODE_NAME,
    in_pod=True,
    uid=0,
    hostname="npu-agent-7xk2p",
)
"""That of the agent's Pod."""
RIGHTS = {
    *((verb, "nodes") for verb in ("get", "watch", "patch")),
    *((verb, "events") for verb in ("create", "patch")),
}

RNGD = {"name": "npu-0", "attributes": {"arch": {"string": "rngd"}, "cores": {"int": 8}}}
"""A device in a ResourceSlice."""
GROUPS = {
    "tokenreviews": "authentication.k8s.io",
    "subjectaccessreviews": "authorization.k8s.io",
    "resourceclaims": "resource.k8s.io",
    "resourceslices": "resource.k8s.io",
}


class ApiServer(FaultyApiServer):
    """An API server with one Node.

    Attributes:
        rights: of the core group and of the reviews.
        denied: of the rights to what DRA has.
        asked: paths.
    """

    def __init__(self) -> None:
        super().__init__(NODE_NAME)
        self.readers = {"account", "node"}
        self.rights = set(RIGHTS)
        self.denied: set[tuple[str, str]] = set()
        self.asked: list[str] = []
        ready = {"type": "Ready", "status": "True"}
        self.objects[NODES][NODE_NAME] |= {
            "spec": {},
            "status": {"conditions": [ready], "nodeInfo": {"kubeletVersion": "v1.36.3"}},
        }
        self.publish("00000-npu.furiosa.ai-n1", 2)

    def publish(self, name: str, count: int) -> None:
        """A driver has a slice with so many devices."""
        pool = {"name": NODE_NAME, "generation": 1, "resourceSliceCount": 1}
        self.put(name, driver="npu.furiosa.ai", pool=pool, devices=[RNGD] * count)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        as_node = "impersonate-on:associated-node:" * ("Impersonate-User" in request.headers)
        if self.trouble is None and request.path.endswith("/selfsubjectaccessreviews"):
            return self._review(await request.json())
        if request.path.startswith(NODES) and (f"{as_node}get", "nodes") not in self.rights:
            return await status(403, "nodes is forbidden: User cannot get resource")(request)
        return await super().answer(request)

    def _review(self, review: dict[str, Any]) -> web.Response:
        """As RBAC does: a right to Events of one namespace is none to those of another."""
        asked = review["spec"]["resourceAttributes"]
        right = (asked["verb"], asked["resource"])
        assert asked["group"] == GROUPS.get(asked["resource"], "")
        assert asked.get("namespace", "") == {"events": "default"}.get(asked["resource"], "")
        of_dra = asked["group"] == "resource.k8s.io"
        allowed = right not in self.denied if of_dra else right in self.rights
        return web.json_response({**review, "status": {"allowed": allowed}}, status=201)


@dataclass
class Port:
    """What answers at an address of the agent; all but `number` may be changed at any time."""

    status: dict[str, Any] = field(default_factory=dict)
    """/status.json; its ``unready`` are the reasons of /readyz, too."""
    healthz: str = "ok\n"
    number: int = 0
    runner: web.ServerRunner | None = None

    async def start(self) -> None:
        self.runner = web.ServerRunner(web.Server(self._answer))
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.number)
        await site.start()
        self.number = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner:
            await self.runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.path:
            case "/healthz":
                return web.Response(text=self.healthz)
            case "/status.json" if "cards" in self.status:
                return web.json_response(self.status)
            case "/readyz":
                return web.json_response({"reasons": self.status.get("unready", [])})
        return web.Response(status=404)


@dataclass
class Node:
    """All of it; tests take it apart."""

    root: Path
    context: Context
    kubelet: StandInKubelet
    api: ApiServer
    probes: Port
    """At metrics.probes."""
    pages: Port
    """At metrics.listen."""
    lock: ExitStack
    """Closed, it releases the agent's lock."""
    plugins: list[UnixServer] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.context.directory

    async def examined(self) -> dict[str, Check]:
        """The lines by name."""
        found = {check.name: check for check in await examine(self.context)}
        assert not [each for each in found.values() if each.detail.startswith("internal error")]
        return found

    async def serve_plugin(self, name: str) -> None:
        """A device plugin on a socket of this name."""
        server = UnixServer([_Plugin()], self.directory / name)
        await server.listen()
        self.plugins.append(server)

    def reconfigure(self, **values: Any) -> None:
        self.context = replace(self.context, config=replace(self.context.config, **values))

    def reports(self, **values: Any) -> None:
        """What the agent reports, at both of its addresses."""
        self.pages.status.update({"cards": [], **values})
        self.probes.status.update({k: v for k, v in values.items() if k == "unready"})


class _Plugin(wire.DevicePluginBase):
    async def get_device_plugin_options(self, _: wire.Empty) -> wire.DevicePluginOptions:
        return wire.DevicePluginOptions()


def unserved(path: Path) -> None:
    """Leaves a socket behind as a process does that was killed."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@contextmanager
def locked(directory: Path, host: str = POD.hostname) -> Iterator[int]:
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


TUNED = {
    "proc/sys/kernel/io_uring_disabled": b"0\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": b"65536\n",
}


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def tuned(root: Path) -> None:
    """As the vendor's pages advise: no switch above a card has ACS."""
    for name, content in TUNED.items():
        put(root / name, content)
    host = Furiosa(root)
    for card in map(host.identify, host.scan()):
        for port in card.switches[2:]:
            put(root / "sys/bus/pci/devices" / port / "config", bytes(4096))


@asynccontextmanager
async def good_node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """The agent's Pod on a node where nothing is wrong."""
    with short_directory() as base, ExitStack() as lock:
        root, directory = base / "host", base / "device-plugins"
        directory.mkdir()
        simulator.make(root, simulator.parse_cards("warboy=1,rngd=1"), plain_nodes=True)
        (root / "sys/fs/cgroup").mkdir(parents=True)
        tuned(root)
        api, probes, pages = ApiServer(), Port(), Port()
        pages.status = {"version": "0.1.0", "cards": [], "problems": [], "notes": []}
        kubelet = StandInKubelet(directory, base / "pod-resources")
        for part in (probes, pages, kubelet):
            await part.start()
        lock.enter_context(locked(directory))
        metrics = MetricsConfig(
            listen=f"127.0.0.1:{pages.number}", probes=f"127.0.0.1:{probes.number}"
        )
        async with serving(api.answer) as server:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig(base, server.url)))
            monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
            context = replace(
                POD,
                config=replace(POD.config, plugin_dir=str(directory), metrics=metrics),
                host_root=root,
                vendor=Furiosa(root),
                timing=CheckTiming(request=20.0),  # of a busy machine
            )
            node = Node(root, context, kubelet, api, probes, pages, lock)
            try:
                await node.serve_plugin("furiosa-npu-0123abcd.sock")
                await node.serve_plugin("nvidia-gpu.sock")
                yield node
            finally:
                for plugin in node.plugins:
                    await plugin.shutdown()
                for part in (kubelet, probes, pages):
                    await part.stop()


@dataclass(frozen=True)
class Break:
    """Something that is wrong with a node."""

    do: Callable[[Node], object]
    """What it returns is awaited, if it can be."""
    lines: str | dict[str, State]
    """The lines that change, the broken one first; or the one that is wrong."""
    detail: str = ""
    """Words of the first one."""
    remedy: str = ""
    gone: tuple[str, ...] = ()
    """Lines that are there no more."""


async def check_break(node: Node, broken: Break) -> None:
    """Exactly these lines have to turn; every other one stays as it was, word for word."""
    before = await node.examined()
    doing = broken.do(node)
    if isinstance(doing, Awaitable):
        await doing
    after = await node.examined()
    lines = {broken.lines: State.WRONG} if isinstance(broken.lines, str) else broken.lines
    turned = {key: after[key].state for key in after if after[key] != before.get(key)}
    assert turned == lines, turned
    assert before.keys() - after.keys() == set(broken.gone)
    line = after[next(iter(lines))]
    assert broken.detail in line.detail
    assert broken.remedy in line.remedy
    assert line.remedy or line.state is not State.WRONG
    # There is something to type for it.
    assert bool(line.command) or line.state is not State.WRONG
