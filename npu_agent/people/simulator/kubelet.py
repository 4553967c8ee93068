"""A stand-in for the kubelet's device manager, for the demo and for tests that need speed.

It does what the real one (1.37) does with a device plugin, in the same order: sweeps the sockets at
its start, serves Registration, dials the plugin back inside Register, holds one ListAndWatch
stream, asks for a preferred allocation and allocates. Tests make one of it that misbehaves
(tests/kubelet/kubelet.py); what neither can show is tested on a real kubelet (tests/e2e).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent.feed import Feed
from npu_agent.kubelet.rpc import (
    UNANSWERED,
    Channel,
    GRPCError,
    Status,
    UnixChannel,
    UnixServer,
)
from npu_agent.kubelet.wire import v1 as pods
from npu_agent.kubelet.wire import v1beta1 as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPlugin:
    """The kubelet's state of a resource."""

    endpoint: str
    devices: tuple[tuple[str, str], ...] = ()
    """(device ID, ``Healthy`` or ``Unhealthy``), as the last message listed them."""
    messages: int = 0
    """ListAndWatch messages received on this stream."""
    connected: bool = True

    def healthy(self) -> tuple[str, ...]:
        if not self.connected:
            return ()
        return tuple(id_ for id_, health in self.devices if health == "Healthy")


@dataclass(frozen=True, slots=True)
class GivenDevices:
    """The devices, nodes and environment of a container."""

    ids: tuple[str, ...]
    environment: Mapping[str, str]
    nodes: tuple[str, ...]
    """Paths of the device nodes in the container."""


class NotEnoughError(Exception):
    """A Pod asks for more than there is; it would stay Pending."""


class StandInKubelet(wire.RegistrationBase):
    """Serves Registration on ``kubelet.sock`` in `directory`; `plugins` is what it has learnt."""

    def __init__(self, directory: Path, pod_resources: Path | None = None) -> None:
        self.plugins: Feed[Mapping[str, ListedPlugin]] = Feed({})
        self.clients: dict[str, dict[str, Channel]] = {}
        """The plugins of each resource by their sockets."""
        self.connected: dict[str, dict[str, Channel]] = {}
        """What each resource can be allocated by; the last of them is used."""
        self.server: UnixServer | None = None
        self._directory = directory
        self._channels: list[Channel] = []
        self._streams: set[asyncio.Task[None]] = set()
        self.taken: dict[str, dict[str, str]] = {}
        """For each resource, the Pod that holds each device in use."""
        self._pod_resources = pod_resources
        self.lister: UnixServer | None = None

    async def start(self) -> None:
        for path in self._directory.iterdir():
            if path.is_socket():
                path.unlink(missing_ok=True)  # its plugin may do so at the same moment
        if self._pod_resources:
            self._pod_resources.mkdir(exist_ok=True)
            self.lister = UnixServer([_Lister(self)], self._pod_resources / "kubelet.sock")
            await self.lister.listen()
        await self.listen()

    async def stop(self) -> None:
        """Goes away: every stream is cut. Which device a Pod holds is remembered, as on disk."""
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        for channel in self._channels:
            channel.close()
        self.clients.clear()
        self.connected.clear()
        self._channels.clear()
        for server in (self.server, self.lister):
            if server:
                await server.shutdown()
        self.server = self.lister = None

    async def allocate(self, resource: str, count: int, pod: str = "pod") -> GivenDevices:
        """Starts a "Pod" of this name that asks for `count` devices.

        Raises:
            NotEnoughError: there are not as many healthy free ones.
            GRPCError: the plugin refuses.
        """
        plugin = self.plugins.value.get(resource)
        taken = self.taken.setdefault(resource, {})
        free = [id_ for id_ in (plugin.healthy() if plugin else ()) if id_ not in taken]
        if resource not in self.connected or len(free) < count:
            raise NotEnoughError(f"{count} of {resource} wanted, {len(free)} free")
        stub = self._stub(resource)
        preferred = await stub.get_preferred_allocation(
            wire.PreferredAllocationRequest(
                container_requests=[
                    wire.ContainerPreferredAllocationRequest(
                        available_device_i_ds=free, allocation_size=count
                    )
                ]
            )
        )
        ids = preferred.container_responses[0].device_i_ds
        grant = await self.allocate_ids(resource, ids)
        taken.update(dict.fromkeys(ids, pod))
        return grant

    async def allocate_ids(self, resource: str, ids: Sequence[str]) -> GivenDevices:
        """The Allocate call alone, with any IDs.

        Raises:
            GRPCError: the plugin refuses.
        """
        response = await self._stub(resource).allocate(
            wire.AllocateRequest(
                container_requests=[wire.ContainerAllocateRequest(devices_ids=list(ids))]
            )
        )
        given = response.container_responses[0]
        return GivenDevices(
            tuple(ids), dict(given.envs), tuple(d.container_path for d in given.devices)
        )

    def release(self, resource: str, ids: Sequence[str]) -> None:
        """The "Pod" that held these devices has ended."""
        for id_ in ids:
            self.taken[resource].pop(id_, None)

    async def until(
        self, resource: str, condition: Callable[[ListedPlugin], bool], timeout: float
    ) -> ListedPlugin:
        """Waits until what is known of `resource` meets `condition`.

        Raises:
            TimeoutError: it did not within `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            plugins = await self.plugins.until(
                lambda plugins: resource in plugins and condition(plugins[resource])
            )
        return plugins[resource]

    def _stub(self, resource: str) -> wire.DevicePluginStub:
        *_, channel = self.connected[resource].values()
        return wire.DevicePluginStub(channel, timeout=10)

    async def listen(self) -> None:
        """Serves Registration, on a new socket."""
        self.server = UnixServer([self], self._directory / "kubelet.sock")
        await self.server.listen()

    async def register(self, register_request: wire.RegisterRequest) -> wire.Empty:
        """Handles a plugin's Register: dials it back, and keeps its stream open.

        Raises:
            GRPCError: the plugin is refused, or does not answer.
        """
        request = register_request  # whose name the generated base gives
        resource = request.resource_name
        endpoint = request.endpoint
        channel = UnixChannel(self._directory / endpoint)
        self._channels.append(channel)
        clients = self.clients.setdefault(resource, {})
        connected = self.connected.setdefault(resource, {})
        clients[endpoint] = channel
        try:
            # The real one does this inside Register, before it answers: so here too.
            await _greet(channel, twice=endpoint in connected)
        except (*UNANSWERED, GRPCError) as error:
            clients.pop(endpoint)
            channel.close()
            raise GRPCError(Status.UNKNOWN, f"failed to dial device plugin: {error}") from error
        connected[endpoint] = channel
        before = self.plugins.value.get(resource)
        devices = before.devices if before and before.connected else ()
        self._know(resource, ListedPlugin(endpoint=endpoint, devices=devices))
        stream = asyncio.create_task(self.watch(resource, endpoint, channel))
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)
        return wire.Empty()

    async def watch(self, resource: str, endpoint: str, channel: Channel) -> None:
        """Holds the stream of ListAndWatch until it ends."""
        try:
            stub = wire.DevicePluginStub(channel)
            async for message in stub.list_and_watch(wire.Empty()):
                plugin = self.plugins.value[resource]
                devices = tuple((device.id, device.health) for device in message.devices)
                self._know(resource, replace(plugin, devices=devices, messages=plugin.messages + 1))
        except (*UNANSWERED, GRPCError):
            pass  # an end like any other: the plugin has gone
        finally:
            channel.close()
            self.drop(resource, endpoint)

    def drop(self, resource: str, endpoint: str) -> None:
        """A stream has ended. As the real one (`runClient`), it does so for known clients alone."""
        if client := self.clients.get(resource, {}).pop(endpoint, None):
            client.close()
            connected = self.connected[resource]
            connected.pop(endpoint, None)
            if not connected:
                self._know(resource, replace(self.plugins.value[resource], connected=False))

    def _know(self, resource: str, plugin: ListedPlugin) -> None:
        self.plugins.publish({**self.plugins.value, resource: plugin})


async def _greet(channel: Channel, *, twice: bool) -> None:
    await wire.DevicePluginStub(channel).get_device_plugin_options(wire.Empty(), timeout=10)
    if twice:
        raise GRPCError(Status.UNKNOWN, "device plugin already connected")


class _Lister(pods.PodResourcesListerBase):
    def __init__(self, kubelet: StandInKubelet) -> None:
        self._kubelet = kubelet

    async def list(
        self,
        list_pod_resources_request: pods.ListPodResourcesRequest,  # noqa: ARG002 (it is empty)
    ) -> pods.ListPodResourcesResponse:
        return pods.ListPodResourcesResponse(
            pod_resources=[
                pods.PodResources(
                    name=pod,
                    namespace="default",
                    containers=[
                        pods.ContainerResources(
                            name="main",
                            devices=[
                                pods.ContainerDevices(resource_name=resource, device_ids=[id_])
                            ],
                        )
                    ],
                )
                for resource, taken in self._kubelet.taken.items()
                for id_, pod in taken.items()
            ]
        )
