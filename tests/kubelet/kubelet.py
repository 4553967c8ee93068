"""The stand-in for the kubelet's device manager, made to misbehave."""

from __future__ import annotations

import asyncio
from pathlib import Path

from npu_agent.kubelet.rpc import Channel, GRPCError, Status
from npu_agent.kubelet.wire import v1beta1 as wire
from npu_agent.people.simulator.kubelet import StandInKubelet


class FaultyKubelet(StandInKubelet):
    """Its attributes may be set at any time, but `several` before anything registers.

    Attributes:
        calls: of Register.
        refusal: if set, Register is refused with this message.
        answers: if not, Register is never answered.
        asks: if not, ListAndWatch is never called after Register.
        several: whether it knows each plugin of a resource by its socket, as from Kubernetes 1.37
            on, and not only the one that registered last.
    """

    def __init__(self, directory: Path, pod_resources: Path | None = None) -> None:
        super().__init__(directory, pod_resources)
        self.calls = 0
        self.refusal = ""
        self.answers = True
        self.asks = True
        self.several = True

    async def renew_socket(self) -> None:
        """Makes a new ``kubelet.sock`` and keeps its streams, as newer kubelets may."""
        if self.server:
            await self.server.shutdown()
        await self.listen()

    def hang_up(self, resource: str) -> None:
        """Ends its stream of `resource`, and would never open one again without a Register."""
        for channel in self.clients[resource].values():
            channel.close()

    async def register(self, register_request: wire.RegisterRequest) -> wire.Empty:
        self.calls += 1
        if not self.answers:
            await asyncio.Event().wait()
        if self.refusal:
            raise GRPCError(Status.UNKNOWN, self.refusal)
        if self.several:
            return await super().register(register_request)
        resource = register_request.resource_name
        self.clients.pop(resource, None)
        answer = await super().register(register_request)
        connected = self.connected[resource]
        for endpoint in [*connected][:-1]:
            del connected[endpoint]
        return answer

    async def watch(self, resource: str, endpoint: str, channel: Channel) -> None:
        if self.asks:
            await super().watch(resource, endpoint, channel)

    def drop(self, resource: str, endpoint: str) -> None:
        if not self.several:  # it drops whichever client the resource has by now
            endpoint = next(iter(self.clients.get(resource, {})), "")
        super().drop(resource, endpoint)
