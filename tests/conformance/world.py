"""Where a driver is judged: a stand-in for its kubelet, a real API server, claims."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from npu_agent.kubelet.rpc import UnixChannel, apart
from npu_agent.kubelet.wire import pluginregistration
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1 as wire
from npu_agent.people.simulator.kubelet import StandInKubelet
from npu_agent.people.simulator.pluginmanager import Instance, StandInPluginManager
from tests.cluster.build import KUBERNETES
from tests.conformance.apiserver import ApiServer, api_server
from tests.until import until

NODE = "conformance-node"
CALL = 45.0
"""Seconds that the kubelet gives a driver to prepare or unprepare (pkg/kubelet/cm/dra/plugin)."""
PATIENCE = 30.0
"""Seconds for all that has no limit of the kubelet's; a Pod is killed 30 s after its TERM."""
SLICES = 90.0
"""Seconds until slices are back: client-go's drivers look 30 s after an event."""
_NODE_INFO = (
    "architecture",
    "bootID",
    "containerRuntimeVersion",
    "kernelVersion",
    "kubeProxyVersion",
    "kubeletVersion",
    "machineID",
    "operatingSystem",
    "osImage",
    "systemUUID",
)
_DRA = "/apis/resource.k8s.io/v1"
_CLAIMS = f"{_DRA}/namespaces/default/resourceclaims"


@dataclass(frozen=True, order=True)
class Device:
    """A device of the driver's pool, or of another driver's."""

    pool: str
    name: str
    driver: str = field(compare=False)
    shares: bool = field(default=False, compare=False)
    """Several claims may have it at the same time."""


@dataclass(frozen=True)
class Claim:
    """A claim as the kubelet names it."""

    name: str
    uid: str

    @property
    def path(self) -> str:
        return f"{_CLAIMS}/{self.name}"


@dataclass(frozen=True)
class Answer:
    """What a driver answers for one claim."""

    error: str
    devices: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = ()
    """Pool, device, request names and CDI IDs of each, sorted."""

    @property
    def cdi_ids(self) -> set[str]:
        return {one for device in self.devices for one in device[3]}


@dataclass
class World:
    """The driver `name`, started by `command` in a shell in `directory`.

    The command finds $KUBELET_DIR and, for CDI specs alone and not made yet, $CDI_DIR, which is
    $HOST_ROOT/var/run/cdi. $NODE_NAME and $KUBECONFIG are as in a Pod.
    """

    name: str
    command: str
    directory: Path
    api: ApiServer
    manager: StandInPluginManager
    process: subprocess.Popen[bytes] | None = None
    _numbers: Iterable[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def cdi(self) -> Path:
        return self.host / "var/run/cdi"

    @property
    def host(self) -> Path:
        return self.directory / "host"

    @property
    def kubelet(self) -> Path:
        return self.directory / "kubelet"

    # --- the driver's process ---------------------------------------------------------------

    def start(self) -> None:
        env = {
            **os.environ,
            "KUBECONFIG": str(self.api.kubeconfig),
            "HOST_ROOT": str(self.host),
            "KUBELET_DIR": str(self.kubelet),
            "CDI_DIR": str(self.cdi),
            "NODE_NAME": NODE,
        }
        with (self.directory / "driver.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", f"exec {self.command}"],
                cwd=self.directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the driver a signal; returns when it has ended and is registered no more.

        Raises:
            AssertionError: it has not ended within `PATIENCE`; it is killed then.
        """
        if self.process is None:
            return
        self.process.send_signal(number)
        try:
            await until(lambda: not self.runs, "the driver ends", deadline=PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            # What a killed one leaves is no registration, as nothing answers there.
            await self.manager.stop()
            await self.manager.start()

    async def restart(self, number: signal.Signals = signal.SIGTERM) -> Instance:
        await self.end(number)
        self.start()
        return await self.registered()

    async def registered(self) -> Instance:
        """The driver's newest instance, once there is one that answers."""

        def newest() -> Instance | None:
            found = [one for one in self.manager.instances.value if one.driver == self.name]
            return found[-1] if found else None

        found = await until(newest, "the driver is registered", deadline=PATIENCE)
        assert found is not None
        return found

    async def services(self) -> list[str]:
        """What it names to kubelets, in its order."""
        async with UnixChannel((await self.registered()).socket) as channel:
            stub = pluginregistration.RegistrationStub(channel)
            info = await apart(stub.get_info(pluginregistration.InfoRequest(), timeout=CALL))
        return list(info.supported_versions)

    # --- its slices -------------------------------------------------------------------------

    async def slices(self) -> list[dict[str, Any]]:
        """Those of the driver on the Node."""
        query = f"fieldSelector=spec.nodeName={NODE},spec.driver={self.name}"
        found = await self.api.ask("GET", f"{_DRA}/resourceslices?{query}")
        return list(found["items"])

    async def complete_pool(self) -> list[dict[str, Any]]:
        """Its slices, once the scheduler would take them: all of one generation are there."""

        async def complete() -> list[dict[str, Any]]:
            found = await self.slices()
            pools: dict[str, list[Any]] = {}
            for one in found:
                pools.setdefault(one["spec"]["pool"]["name"], []).append(one["spec"]["pool"])
            good = [
                len({one["generation"] for one in pool}) == 1
                and len(pool) == pool[0]["resourceSliceCount"]
                for pool in pools.values()
            ]
            return found if good and all(good) else []

        slices: list[dict[str, Any]] = await until(
            complete, "a complete pool", deadline=SLICES, interval=0.1
        )
        return slices

    async def delete_slices(self) -> None:
        for one in await self.slices():
            await self.api.ask("DELETE", f"{_DRA}/resourceslices/{one['metadata']['name']}")

    async def devices(self) -> list[Device]:
        """Devices that can be had at the same time: of those that share counters, one each."""
        found: list[Device] = []
        counters: set[str] = set()
        for one in await self.complete_pool():
            for device in one["spec"].get("devices", ()):
                used = {each["counterSet"] for each in device.get("consumesCounters", ())}
                if not used & counters:
                    counters |= used
                    shares = device.get("allowMultipleAllocations", False)
                    pool = one["spec"]["pool"]["name"]
                    found.append(Device(pool, device["name"], self.name, shares))
        return found

    # --- claims -----------------------------------------------------------------------------

    async def claim(self, *devices: Device) -> Claim:
        """A claim to which the scheduler has allocated these devices; none: not allocated.

        Its requests ``r0``, ``r1`` are for the devices of one driver each.
        """
        name = f"claim-{next(iter(self._numbers))}"
        drivers = list(dict.fromkeys(device.driver for device in devices)) or [self.name]
        requests = [
            {"name": f"r{at}", "exactly": {"deviceClassName": "any", "count": count}}
            for at, driver in enumerate(drivers)
            for count in [sum(device.driver == driver for device in devices) or 1]
        ]
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": requests}},
        }
        made = await self.api.ask("POST", _CLAIMS, claim)
        if devices:
            results = [
                {
                    "request": f"r{drivers.index(device.driver)}",
                    "driver": device.driver,
                    "pool": device.pool,
                    "device": device.name,
                }
                for device in devices
            ]
            made["status"] = {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": f"pod-{name}", "uid": str(uuid4())}],
            }
            await self.api.ask("PUT", f"{_CLAIMS}/{name}/status", made)
        return Claim(name, made["metadata"]["uid"])

    async def prepare(self, *claims: Claim) -> dict[str, Answer]:
        """One call; the answers by UID.

        Raises:
            GRPCError: it refuses the call, and so all of the claims.
        """
        answers = {}
        for uid, answer in (await self._call("prepare", claims)).items():
            devices = sorted(
                (
                    device.pool_name,
                    device.device_name,
                    tuple(sorted(device.request_names)),
                    tuple(sorted(device.cdi_device_ids)),
                )
                for device in answer.devices
            )
            answers[uid] = Answer(answer.error, tuple(devices))
        return answers

    async def unprepare(self, *claims: Claim) -> dict[str, Answer]:
        answers = await self._call("unprepare", claims)
        return {uid: Answer(answer.error) for uid, answer in answers.items()}

    async def _call(self, what: str, claims: Iterable[Claim]) -> Mapping[str, Any]:
        instance = await self.registered()
        kind = getattr(wire, f"Node{what.capitalize()}ResourcesRequest")
        named = [wire.Claim(namespace="default", name=one.name, uid=one.uid) for one in claims]
        async with UnixChannel(Path(instance.endpoint)) as channel:
            method = getattr(wire.DraPluginStub(channel), f"node_{what}_resources")
            response = await apart(method(kind(claims=named), timeout=CALL))
        return dict(response.claims)

    # --- CDI --------------------------------------------------------------------------------

    def specs(self) -> dict[Path, Any]:
        """The CDI specs that there are; None where one is neither JSON nor YAML."""
        found = {}
        for path in sorted(self.cdi.glob("*")):
            if path.suffix in (".json", ".yaml"):
                try:
                    found[path] = yaml.safe_load(path.read_text(encoding="utf-8"))
                except (ValueError, yaml.YAMLError):
                    found[path] = None
        return found


@asynccontextmanager
async def world(name: str, command: str, directory: Path) -> AsyncIterator[World]:
    """A world in an empty directory with a short path, its driver not started yet."""
    async with api_server(directory) as api:
        await _register_node(api)
        manager = StandInPluginManager(directory / "kubelet")
        judged = World(name, command, directory, api, manager)
        judged.host.mkdir()
        for part in ("plugins", "device-plugins"):
            (judged.kubelet / part).mkdir(parents=True)
        await manager.start()
        lists = StandInKubelet(judged.kubelet / "device-plugins", judged.kubelet / "pod-resources")
        await lists.start()
        try:
            yield judged
        finally:
            await judged.end(signal.SIGKILL)
            await manager.stop()
            await lists.stop()


async def _register_node(api: ApiServer) -> None:
    """As a kubelet does: drivers may ask for its version."""
    node = await api.ask("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
    version = KUBERNETES.version
    node["status"] = {"nodeInfo": {**dict.fromkeys(_NODE_INFO, ""), "kubeletVersion": version}}
    await api.ask("PUT", f"/api/v1/nodes/{NODE}/status", node)


def last_words(directory: Path, lines: int = 15) -> str:
    text = (directory / "driver.log").read_text(errors="replace", encoding="utf-8")
    return "\n".join(text.splitlines()[-lines:])


def brief(value: object) -> str:
    return json.dumps(value, default=str)[:300]
