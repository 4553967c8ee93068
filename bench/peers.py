"""Programs of others next to ours, measured by the same clients: `make bench ARGS=--peers`.

All are built from their Go modules (tests/cluster/build.py) and need no hardware. This needs root:
the plugins know the kubelet by its path alone, so each has a mount namespace in which that path is
of a stand-in. Claims are prepared with a real API server, and Pods run on a real node.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import stat
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.against import SETTLED
from bench.claims import rounds
from bench.figure import Figure, quantiles
from bench.fleet.run import GO
from bench.fleet.server import Asked, requests
from bench.pages import costs
from bench.plugin import allocation, times
from bench.process import (
    DEADLINE,
    IN_POD,
    POLL,
    RESOURCE,
    Process,
    answers,
    free_port,
    image,
    program,
    running,
)
from npu_agent.core.pool import ClaimRef
from npu_agent.people import simulator
from npu_agent.people.simulator.kubelet import StandInKubelet
from tests.cluster import agent, workload
from tests.cluster.build import (
    DRA_EXAMPLE_DRIVER,
    GPU_PLUGIN,
    NODE_EXPORTER,
    SAMPLE_PLUGIN,
    GoBuild,
    ensure_binaries,
    ensure_own,
)
from tests.cluster.node import ADMIN
from tests.conformance.world import World, world
from tests.e2e import manifests
from tests.e2e.node import Node, started
from tests.outputs.deviceplugin.helpers import short_directory
from tests.until import until

COLUMNS = OURS, INTEL, SAMPLE, EXAMPLE, CLIENT_GO, EXPORTER = (
    "npu-agent",
    "Intel GPU plugin",
    "sample plugin",
    "dra-example-driver",
    "client-go",
    "node_exporter",
)
ROOT = Path(__file__).parents[1]
CARDS = 8
TRIES = 3
"""Starts of each plugin; each start loses a card and its kubelet once."""
SCAN = 5.0
"""Seconds between two scans of the slowest plugin."""
CLAIMS = 120
PODS = 5
_APART = """
mount --bind "$1" /mnt && mount -t tmpfs none /run && mount -t tmpfs none /var/lib &&
mkdir -p /run/cdi /var/lib/kubelet && mount --bind /mnt/kubelet /var/lib/kubelet &&
mount -t tmpfs none /tmp && shift && exec "$@"
"""
"""Runs a program where the kubelet's directory is the one in $1, which is /mnt as well."""
_GPU = "gpu.example.com"
_EXAMPLE = (
    "{} --cdi-root $CDI_DIR --kubelet-plugins-directory-path $KUBELET_DIR/plugins "
    "--kubelet-registrar-directory-path $KUBELET_DIR/plugins_registry "
    "--kube-api-qps=1000 --kube-api-burst=1000"
)
"""Without its limit of 5 requests a second, which would be all that one sees of Prepare."""
_PLUGIN, _DRA = "device plugin, metrics", "DRA"


async def peers(seconds: float) -> AsyncIterator[Figure]:
    """All figures, each named after whom it is of; `seconds` of doing nothing for some."""
    gpus = partial(_other, GPU_PLUGIN, "gpu.intel.com/i915", "-prefix=/mnt/host")
    sample = partial(_other, SAMPLE_PLUGIN, "example.com/resource")
    for who, start in ((OURS, _ours), (INTEL, gpus), (SAMPLE, sample)):
        async for figure in _plugin(start, seconds):
            yield _of(who, figure)
    for who, driver, command in ((OURS, manifests.DRIVER, _agent), (EXAMPLE, _GPU, _example)):
        async for figure in _driver(driver, command, seconds):
            yield _of(who, figure)
    async for figure in _client_go(seconds):
        yield _of(CLIENT_GO, figure)
    async for figure in _exporter(seconds):
        yield _of(EXPORTER, figure)
    for who, figure in await asyncio.to_thread(list, _pods()):
        yield _of(who, figure)


def _of(who: str, figure: Figure) -> Figure:
    return Figure(f"{who}: {figure.what}", figure.measured)


def _built(build: GoBuild) -> Path:
    (path,) = ensure_binaries(build).values()
    return path


# --- device plugins -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plugin:
    """A device plugin that is registered with a stand-in for the kubelet."""

    process: Process
    kubelet: StandInKubelet
    resource: str
    sockets: Path
    start: float
    """Seconds from the start of the process until the kubelet had its devices."""
    remove: Callable[[], object] | None = None
    """Takes its first card away; None: it reads nothing of its devices."""
    port: int = 0
    """Where it serves metrics."""

    async def until_healthy(self, devices: int) -> None:
        """Returns when it is registered, and so many devices are healthy."""
        await self.kubelet.until(self.resource, lambda p: len(p.healthy()) == devices, DEADLINE)

    def healthy(self) -> list[str]:
        return sorted(self.kubelet.plugins.value[self.resource].healthy())


Start = Callable[[], AbstractAsyncContextManager[Plugin]]


@asynccontextmanager
async def _ours() -> AsyncIterator[Plugin]:
    async with running(f"rngd={CARDS}", alive=True) as one:
        await one.settled()
        remove = partial(simulator.apply_fault, one.root, "npu0", "gone")
        start = one.start
        yield Plugin(one, one.kubelet, RESOURCE, one.plugins, start, remove, one.port)


@asynccontextmanager
async def _other(build: GoBuild, resource: str, *arguments: str) -> AsyncIterator[Plugin]:
    with tempfile.TemporaryDirectory(prefix="npu-bench-") as temporary:
        directory = Path(temporary)
        sockets = directory / "kubelet/device-plugins"
        sockets.mkdir(parents=True)
        remove = _gpus(directory / "host", stat.S_IFREG).unlink if arguments else None
        apart = ("unshare", "--mount", "--propagation=private", "sh", "-c", _APART, "sh")
        command = (*apart, temporary, str(_built(build)), *arguments)
        own = {"PLUGIN_SOCK_DIR": "/var/lib/kubelet/device-plugins"}  # for the sample
        kubelet = StandInKubelet(sockets)
        await kubelet.start()
        try:
            began = time.perf_counter()
            with program(*command, environment=own) as process:
                await kubelet.until(resource, lambda p: bool(p.healthy()), DEADLINE)
                taken = time.perf_counter() - began
                yield Plugin(process, kubelet, resource, sockets, taken, remove)
        finally:
            await kubelet.stop()


def _gpus(root: Path, kind: int) -> Path:
    """Makes a tree in which Intel's plugin finds GPUs; returns the first one's device node."""
    (root / "dev/dri").mkdir(parents=True)
    for name in (f"card{at}" for at in range(CARDS)):
        (root / "sys/class/drm" / name / "device/drm" / name).mkdir(parents=True)
        (root / "sys/class/drm" / name / "device/vendor").write_text("0x8086\n", encoding="utf-8")
        os.mknod(root / "dev/dri" / name, kind | 0o666, os.makedev(1, 3))
    return root / "dev/dri/card0"


async def _plugin(start: Start, seconds: float) -> AsyncIterator[Figure]:
    taken: dict[str, list[float]] = {}
    for at in range(TRIES):
        async with start() as plugin:
            taken.setdefault("start to registered, device plugin", []).append(plugin.start)
            if not at:
                async for figure in _calls(plugin, seconds):
                    yield figure
            count = len(plugin.healthy())
            if plugin.remove:
                await asyncio.sleep(random.uniform(0, SCAN))
                began = time.perf_counter()
                await asyncio.to_thread(plugin.remove)
                count -= 1
                await plugin.until_healthy(count)
                lost = taken.setdefault("card gone to kubelet informed", [])
                lost.append(time.perf_counter() - began)
            await plugin.kubelet.stop()
            await asyncio.sleep(1)
            await plugin.kubelet.start()
            began = time.perf_counter()
            await plugin.until_healthy(count)
            back = taken.setdefault("kubelet back to registered", [])
            back.append(time.perf_counter() - began)
    for what, durations in taken.items():
        yield Figure(f"{what}, median / longest", median(durations))


def median(seconds: Sequence[float]) -> str:
    """``median / longest``."""
    return f"{statistics.median(seconds):.2f} / {max(seconds):.2f} s"


async def _calls(plugin: Plugin, seconds: float) -> AsyncIterator[Figure]:
    await asyncio.sleep(SETTLED)
    messages = plugin.kubelet.plugins.value[plugin.resource].messages
    yield await _idle(plugin.process, _PLUGIN, seconds)
    sent = plugin.kubelet.plugins.value[plugin.resource].messages - messages
    yield Figure("idle: ListAndWatch messages", f"{sent}")
    ids, name = plugin.healthy(), plugin.kubelet.plugins.value[plugin.resource].endpoint
    for count in (1, CARDS):
        if count <= len(ids):
            request = allocation(ids[:count])
            taken = await asyncio.to_thread(times, plugin.sockets / name, "Allocate", request)
            yield Figure(f"Allocate {count}, p50 / p99", quantiles(taken))
    if plugin.port:  # before its memory is taken, as with an exporter
        page = await costs(plugin.process, plugin.port, "/metrics")
        yield Figure("/metrics, p50 / p99; CPU", page)
    yield _memory(plugin.process, _PLUGIN)


async def _idle(process: Process, what: str, seconds: float) -> Figure:
    before = process.spent()
    await asyncio.sleep(seconds)
    spent = process.spent() - before
    idle = f"{100 * spent.cpu / seconds:.2f} %; {spent.all_threads / seconds:.1f}"
    return Figure(f"idle: CPU; wake-ups of all threads a second, {what}", idle)


def _memory(process: Process, what: str) -> Figure:
    return Figure(f"resident memory, {what}", f"{process.memory() / 1024:.1f} MiB")


# --- DRA, and what asks the API server ----------------------------------------------------------


def _account(judged: World) -> tuple[str, str, str]:
    """The API server's URL, the file with its CA, and a token."""
    config = yaml.safe_load(judged.api.kubeconfig.read_bytes())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    return cluster["server"], cluster["certificate-authority"], user["token"]


def _agent(judged: World) -> str:
    """Starts ours as in a Pod."""
    server, ca, token = _account(judged)
    account = judged.directory / "serviceaccount"
    account.mkdir()
    (account / "token").write_text(token, encoding="utf-8")
    shutil.copy(ca, account / "ca.crt")
    simulator.make(judged.host, simulator.parse_cards(f"rngd={CARDS}"))
    host, _, port = server.removeprefix("https://").rpartition(":")
    place = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    variables = " ".join(f"{key}={value}" for key, value in (image() | place).items())
    return (
        f"env --chdir={ROOT} {variables} {' '.join(IN_POD)} {account} run --host-root $HOST_ROOT "
        "--plugin-dir $KUBELET_DIR/device-plugins --allocation-api dra "
        "--metrics-listen 127.0.0.1:0"
    )


def _example(_: World) -> str:
    return _EXAMPLE.format(_built(DRA_EXAMPLE_DRIVER))


def _informers(judged: World) -> str:
    """What drivers in Go have of client-go, alone: see `bench/fleet/informers`."""
    server, ca, token = _account(judged)
    return f"{ensure_own(GO)} -server={server} -ca={ca} -token={token} -nodes=1"


async def _driver(
    driver: str, command: Callable[[World], str], seconds: float
) -> AsyncIterator[Figure]:
    async with _started(driver, command) as (judged, began):
        instance = await judged.registered()
        await judged.complete_pool()
        taken = f"{time.perf_counter() - began:.2f} s"
        yield Figure("start to registered and published, DRA", taken)
        devices = await judged.devices()
        for count in (1, CARDS):
            made = [await judged.claim(*devices[:count]) for _ in range(CLAIMS)]
            refs = [ClaimRef(namespace="default", uid=one.uid, name=one.name) for one in made]
            prepared, ended = await asyncio.to_thread(rounds, instance, refs, count)
            yield Figure(f"Prepare {count}, p50 / p99", quantiles(prepared))
        yield Figure(f"Unprepare {CARDS}, p50 / p99", quantiles(ended))
        async for figure in _asks(judged, seconds):
            yield figure


async def _client_go(seconds: float) -> AsyncIterator[Figure]:
    async with _started("", _informers) as (judged, _):
        await judged.api.ask("POST", "/api/v1/nodes", {"metadata": {"name": "fleet-00000"}})

        async def published() -> bool:
            found = await judged.api.ask("GET", "/apis/resource.k8s.io/v1/resourceslices")
            return bool(found["items"])

        await until(published, "its slice", deadline=2 * DEADLINE, interval=POLL)
        async for figure in _asks(judged, seconds):
            yield figure


@asynccontextmanager
async def _started(
    driver: str, command: Callable[[World], str]
) -> AsyncIterator[tuple[World, float]]:
    """A real API server and a stand-in kubelet with this driver, and when it was started."""
    with short_directory() as directory:
        async with world(driver, "", directory) as judged:
            judged.command = await asyncio.to_thread(command, judged)
            began = time.perf_counter()
            judged.start()
            yield judged, began


async def _asks(judged: World, seconds: float) -> AsyncIterator[Figure]:
    """What the program of a world needs while idle, and asks the API server."""
    assert judged.process
    await asyncio.sleep(SETTLED)
    since = time.time()
    process = Process(judged.process)
    yield await _idle(process, _DRA, seconds)
    yield _memory(process, _DRA)
    found = requests(judged.api.audit, by_program)
    yield Figure("idle: requests a node-hour", node_hour(found, since, seconds))


def by_program(event: dict[str, Any]) -> bool:
    """Whether a driver has sent the request of an audit event: not us, not the API server."""
    agent = str(event.get("userAgent", ""))
    return not agent.startswith(("Python/", "kube-apiserver/"))


def node_hour(found: Sequence[Asked], since: float, seconds: float) -> str:
    """Requests an hour: those since a moment, and watches by the times that these ask for.

    `found` is short enough that no watch follows another one.
    """
    lives = [re.search(r"timeoutSeconds=(\d+)", one.uri) for one in found if one.verb == "watch"]
    renewals = 3600 * len(lives) / statistics.mean(int(life[1]) for life in lives if life)
    others = sum(one.verb != "watch" and one.at >= since for one in found)
    return f"{others * 3600 / seconds + renewals:.1f}"


# --- an exporter --------------------------------------------------------------------------------


async def _exporter(seconds: float) -> AsyncIterator[Figure]:
    port = free_port()
    with program(str(_built(NODE_EXPORTER)), f"--web.listen-address=127.0.0.1:{port}") as process:
        await until(lambda: answers(port), interval=POLL)
        yield Figure("/metrics, p50 / p99; CPU", await costs(process, port, "/metrics"))
        yield await _idle(process, _PLUGIN, seconds)
        yield _memory(process, _PLUGIN)


# --- Pods on a real node ------------------------------------------------------------------------


def _pods() -> Iterator[tuple[str, Figure]]:
    cards, images = f"rngd={CARDS}", (agent(), workload())
    with started(cards, *images, name="npu-peers") as cluster:
        root = cluster.workdir / "gpus"
        _gpus(root, stat.S_IFCHR)
        node = Node(cluster)
        node.apply(
            [
                manifests.template(manifests.ONE),
                manifests.device_class(_GPU, f'device.driver == "{_GPU}"'),
                manifests.template("gpu", {"name": "gpu", "exactly": {"deviceClassName": _GPU}}),
            ]
        )
        example = (f"--node-name={node.name}", "--cdi-root=/run/cdi")
        with (
            program(*cluster.command(str(_built(GPU_PLUGIN)), f"-prefix={root}")),
            program(*cluster.command(str(_built(DRA_EXAMPLE_DRIVER)), *example)),
        ):
            node.deploy()
            for who, resource in ((OURS, RESOURCE), (INTEL, "gpu.intel.com/i915")):
                node.wait_allocatable(CARDS, resource=resource)
                pod = partial(manifests.npu_pod, resource=resource)
                yield (
                    who,
                    Figure("Pod to Ready, device plugin, median / longest", _ready(node, pod)),
                )
            node.deploy({"allocation": {"api": "dra"}}, "tests/e2e/dra")
            for who, template in ((OURS, manifests.ONE), (EXAMPLE, "gpu")):
                pod = partial(manifests.small, of_template=template)
                yield who, Figure("Pod to Ready, DRA, median / longest", _ready(node, pod))


def _ready(node: Node, make: Callable[[str], dict[str, Any]]) -> str:
    """From the Pod's creation until it is Ready, one Pod after the other; the first warms up."""
    taken = []
    for at in range(PODS + 1):
        name = f"pod-{at}"
        began = time.perf_counter()
        path = "/api/v1/namespaces/default/pods"
        answer = node.cluster.request("POST", path, make(name), token=ADMIN)
        assert answer.status == 201, answer.body
        while not is_ready(node.pod(name)):
            assert time.perf_counter() - began < DEADLINE, node.pod(name)["status"]
            time.sleep(POLL / 2)
        taken.append(time.perf_counter() - began)
        node.delete_pods(name)
    return median(taken[1:])


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether all containers of a Pod are ready, by its condition."""
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True"
