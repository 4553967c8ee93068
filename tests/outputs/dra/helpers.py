"""Devices of a pool, and a driver on its sockets in a directory that is short enough."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_agent.core.hardware import HealthState
from npu_agent.core.pool import ClaimRef, Description, PoolDevice
from npu_agent.feed import Feed
from npu_agent.kubelet.wire.k8s.io.kubelet.pkg.apis.dra import v1
from npu_agent.outputs.dra.claims import Claims
from npu_agent.outputs.dra.service import REGISTRY, DraPlugin, Endpoint, HealthStream
from tests.outputs.deviceplugin.helpers import devices, short_directory, state

DRIVER = "npu.furiosa.ai"
Prepared = tuple[v1.Device, ...] | str
POOL = "node-1"


def listed(*health: HealthState | str) -> tuple[PoolDevice, ...]:
    """A device for each; a text is why it is unhealthy."""
    return tuple(
        PoolDevice(
            name=f"npu-{index}",
            device=devices(
                state(
                    index=index,
                    health=HealthState.UNHEALTHY if isinstance(one, str) else one,
                    reason=one if isinstance(one, str) else f"is {one.value}",
                )
            )[0],
            description=Description(attributes={}, capacity={}, counters={}),
        )
        for index, one in enumerate(health)
    )


def ref(uid: str, name: str = "") -> ClaimRef:
    return ClaimRef(namespace="ml", name=name or f"claim-{uid}", uid=uid)


def given(device: str, *requests: str) -> v1.Device:
    return v1.Device([*requests], POOL, device, [f"furiosa.ai/claim={device}"])


class StandInClaims(Claims):
    """Answers calls by two functions."""

    def __init__(self, prepare: Any, unprepare: Any) -> None:
        self.prepare = prepare  # type: ignore[method-assign]
        self.unprepare = unprepare  # type: ignore[method-assign]


@dataclass
class Driver:
    """A driver that answers what a test puts here."""

    devices: Feed[tuple[PoolDevice, ...] | None] = field(
        default_factory=lambda: Feed(listed(HealthState.HEALTHY, "it is too hot"))
    )
    prepared: Mapping[str, Prepared] = field(default_factory=dict)
    """By UID."""
    unprepared: str = ""
    """Why not; "": they are."""
    asked: list[tuple[str, tuple[ClaimRef, ...]]] = field(default_factory=list)

    async def prepare(self, refs: Sequence[ClaimRef]) -> Mapping[str, Prepared]:
        self.asked.append(("prepare", tuple(refs)))
        return self.prepared

    async def unprepare(self, refs: Sequence[ClaimRef]) -> str:
        self.asked.append(("unprepare", tuple(refs)))
        return self.unprepared

    def endpoint(self, root: Path, **options: Any) -> Endpoint:
        given = {
            "driver": DRIVER,
            "kubelet_root": root,
            "plugin": DraPlugin(StandInClaims(self.prepare, self.unprepare)),
            "health": HealthStream(POOL, self.devices),
        }
        return Endpoint(**{**given, **options})

    @asynccontextmanager
    async def served(self, root: Path, **options: Any) -> AsyncIterator[Endpoint]:
        endpoint = self.endpoint(root, **options)
        await endpoint.start()
        try:
            yield endpoint
        finally:
            self.devices.close()
            await endpoint.close()


@asynccontextmanager
async def kubelet_root() -> AsyncIterator[Path]:
    """A kubelet's root directory, as far as drivers need it."""
    with short_directory() as root:
        (root / REGISTRY).mkdir()
        yield root
