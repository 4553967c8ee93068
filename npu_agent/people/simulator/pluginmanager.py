"""A stand-in for the kubelet's plugin and DRA managers, for the demo and for tests that need speed.

It does what a real one (1.36) does with a DRA driver, in the same order and with its deadlines:
finds registration sockets, asks for GetInfo, chooses a version, registers and notifies, opens the
health stream, calls the newest instance to prepare and unprepare claims, and checks the answers.
What it cannot show is tested on a real kubelet (tests/e2e).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from npu_agent.core.pool import ClaimRef
from npu_agent.feed import Feed
from npu_agent.kubelet.rpc import UNANSWERED, Channel, GRPCError, UnixChannel, apart
from npu_agent.kubelet.wire import pluginregistration, v1alpha1
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1 as wire

# Seconds that the real one gives a driver for each step.
_GET_INFO = 1.0
_NOTIFY = 5.0
_CALL = 45.0
_LOOK = 0.02
"""Seconds between two lists of the sockets."""
_STREAM_AGAIN = 5.0
"""Seconds until a health stream that ended is opened again."""
_RETRY = 0.5
"""Seconds until a registration that failed is tried again; the real one waits longer each time."""

_LOST = (*UNANSWERED, GRPCError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A registered instance of a driver."""

    driver: str
    socket: Path
    endpoint: str


Devices = Mapping[tuple[str, str, str], tuple[str, str]]
"""By driver, pool and device: its health, as a Pod's status has it, and the driver's message."""


class PrepareError(Exception):
    """Claims that are not prepared or not unprepared; the words are those of a Pod's event."""


class StandInPluginManager:
    """Looks after `plugins_registry` in a kubelet's root directory.

    `instances` are the registered ones, the newest last; `health` is what they reported.
    """

    def __init__(self, root: Path, *, service: str = "v1.DRAPlugin") -> None:
        """`service` is the one that this kubelet can call."""
        self.instances: Feed[tuple[Instance, ...]] = Feed(())
        self.health: Feed[Devices] = Feed(MappingProxyType({}))
        self.failures: list[str] = []
        """Why registrations failed, in the kubelet's words, as its log would have them."""
        self._registry = root / "plugins_registry"
        self._service = service
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._registry.mkdir(parents=True, exist_ok=True)
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Goes away: streams and connections are cut, and everything is forgotten."""
        if self._running:
            await _end(self._running)
            self._running = None

    async def restart(self) -> None:
        """Stops and starts: each driver is asked and notified again."""
        await self.stop()
        await self.start()

    def state(self, driver: str, pool: str, device: str) -> tuple[str, str]:
        """A device's health and its message, as a Pod's status would have them."""
        return self.health.value.get((driver, pool, device), ("Unknown", ""))

    async def prepare(self, driver: str, *claims: ClaimRef) -> Mapping[str, list[wire.Device]]:
        """Prepares the claims of one Pod, in one call; answers by UID.

        Raises:
            PrepareError: as the Pod's event would say it.
        """
        request = wire.NodePrepareResourcesRequest(claims=_claims(claims))
        async with UnixChannel(self._endpoint(driver)) as channel:
            call = wire.DraPluginStub(channel).node_prepare_resources(request, timeout=_CALL)
            response = await self._answer("NodePrepareResources", call, claims)
        return {uid: answer.devices for uid, answer in response.claims.items()}

    async def unprepare(self, driver: str, *claims: ClaimRef) -> None:
        """Unprepares the claims of one Pod, in one call.

        Raises:
            PrepareError: as the kubelet would log it; the Pod stays Terminating.
        """
        request = wire.NodeUnprepareResourcesRequest(claims=_claims(claims))
        async with UnixChannel(self._endpoint(driver)) as channel:
            call = wire.DraPluginStub(channel).node_unprepare_resources(request, timeout=_CALL)
            await self._answer("NodeUnprepareResources", call, claims)

    def _endpoint(self, driver: str) -> Path:
        for instance in reversed(self.instances.value):
            if instance.driver == driver:
                return Path(instance.endpoint)
        raise PrepareError(f"prepare dynamic resources: DRA driver {driver} is not registered")

    async def _answer(self, method: str, call: Any, claims: Sequence[ClaimRef]) -> Any:
        """The answer to a call, with exactly the claims that were asked for."""
        try:
            response = await apart(call)
        except (*_LOST, TimeoutError) as error:
            raise PrepareError(f"prepare dynamic resources: {method}: {error}") from error
        asked = {ref.uid: ref for ref in claims}
        if response.claims.keys() != asked.keys():
            raise PrepareError(f"{method} answers for the claims {', '.join(response.claims)}")
        for uid, answer in response.claims.items():
            if answer.error:
                raise PrepareError(
                    f"prepare dynamic resources: {method} failed for ResourceClaim "
                    f"{asked[uid].name}: {answer.error}"
                )
        return response

    async def _run(self) -> None:
        tasks: dict[Path, asyncio.Task[None]] = {}
        try:
            while True:
                sockets = _sockets(self._registry)
                for socket in tasks.keys() - sockets:
                    await _end(tasks[socket])
                    del tasks[socket]
                for socket in sorted(sockets - tasks.keys()):
                    tasks[socket] = asyncio.create_task(self._serve(socket))
                await asyncio.sleep(_LOOK)
        finally:
            await _end(*tasks.values())

    async def _serve(self, socket: Path) -> None:
        """Keeps the driver of a registration socket registered until cancelled."""
        while True:
            try:
                async with UnixChannel(socket) as channel:
                    await self._register(socket, channel)
            except (*_LOST, TimeoutError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(_RETRY)

    async def _register(self, socket: Path, registration: Channel) -> None:
        """Keeps a driver registered until cancelled; returns if it cannot be."""
        stub = pluginregistration.RegistrationStub(registration)
        info = await apart(stub.get_info(pluginregistration.InfoRequest(), timeout=_GET_INFO))
        if info.type != "DRAPlugin" or self._service not in info.supported_versions:
            refusal = f"none of services supported by the plugin {info.supported_versions}"
            self.failures.append(refusal)
            error = f"RegisterPlugin error -- {refusal}"
            status = pluginregistration.RegistrationStatus(plugin_registered=False, error=error)
            await apart(stub.notify_registration_status(status, timeout=_NOTIFY))
            return
        instance = Instance(driver=info.name, socket=socket, endpoint=info.endpoint or str(socket))
        self.instances.publish((*self.instances.value, instance))
        watching = asyncio.create_task(self._watch(instance))
        try:
            # The real one registers first, and undoes it if this call fails: so here too.
            status = pluginregistration.RegistrationStatus(plugin_registered=True)
            await apart(stub.notify_registration_status(status, timeout=_NOTIFY))
            registration.close()
            await watching
        finally:
            await _end(watching)
            self.instances.publish(
                tuple(other for other in self.instances.value if other != instance)
            )

    async def _watch(self, instance: Instance) -> None:
        """Keeps a driver's health stream open, as the real one does: again after each end."""
        while True:
            try:
                async with UnixChannel(Path(instance.endpoint)) as channel:
                    await apart(self._receive(instance, channel))
            except _LOST:
                pass
            finally:
                # Those of the driver's other instances too, as the real one does.
                self.health.publish(self._others(instance.driver))
            await asyncio.sleep(_STREAM_AGAIN)

    def _others(self, driver: str) -> Devices:
        return {key: health for key, health in self.health.value.items() if key[0] != driver}

    async def _receive(self, instance: Instance, channel: Channel) -> None:
        # A kubelet 1.36 asks every driver for it, even one that does not serve it.
        stub = v1alpha1.DraResourceHealthStub(channel)
        async for message in stub.node_watch_resources(v1alpha1.NodeWatchResourcesRequest()):
            driver = instance.driver
            reports = {
                (driver, device.device.pool_name, device.device.device_name): (
                    str(v1alpha1.HealthStatus(device.health).name).capitalize(),
                    device.message,
                )
                for device in message.devices
            }
            self.health.publish({**self._others(driver), **reports})


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _claims(claims: Sequence[ClaimRef]) -> list[wire.Claim]:
    return [wire.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in claims]


def _sockets(directory: Path) -> set[Path]:
    with contextlib.suppress(OSError):
        return {
            path
            for path in directory.iterdir()
            if not path.name.startswith(".") and path.is_socket()
        }
    return set()
