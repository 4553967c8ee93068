"""A stand-in for the Allocator: it lists what a test publishes, and grants everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from npu_agent.core.offer import Device
from npu_agent.feed import Feed
from npu_agent.kubelet.allocator import Allocator
from npu_agent.outputs.deviceplugin.service import Devices
from tests.outputs.helpers import RESOURCE, Kubelet


class AskedKubelet(Kubelet):
    """Says which devices it can hand out."""

    def __init__(self) -> None:
        super().__init__()
        self.allocatable: dict[str, frozenset[str]] | None = None
        """By resource; None: it does not tell."""
        self.asks = 0

    async def offered(self) -> Mapping[str, frozenset[str]] | None:
        self.asks += 1
        return self.allocatable


class StandInAllocator(Allocator):
    def __init__(self, devices: Feed[Devices]) -> None:
        self.devices = {RESOURCE: devices}
        self.pod_resources = self.kubelet = AskedKubelet()
        self.degraded = Feed({})
        self.losses = 0

    async def renew(self) -> None:
        pass

    async def grant(self, resource: str, devices: Sequence[Device]) -> None:
        pass

    def kubelet_lost(self) -> None:
        self.losses += 1
