"""Turns devices and a request into a Grant or a refusal; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from npu_agent.core.offer import Device
from npu_agent.text import quoted

NULL = "/dev/null"
"""On the host for each node of a simulated card, which has none there."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Devices, nodes and environment for one container."""

    environment: tuple[tuple[str, str], ...]
    """Variables and their values: ``("ANVIL_CORES", "0:0-1,1:0-1")``."""
    nodes: tuple[tuple[str, str], ...]
    """Device nodes, ``rw``, each once: the path in the container, and that on the host."""
    cdi_names: tuple[str, ...]
    """The nodes as names for the container runtime: ``example.com/npu=<device ID>``."""


class Refusal(Enum):
    """Why a request is refused; the service turns it into a gRPC status."""

    INVALID = "invalid argument"
    """No agent could answer it."""
    UNKNOWN = "not found"
    """It names a device that is not listed now."""
    UNFIT = "failed precondition"
    """A device that it names is not to be used."""
    HELD = "held"
    """Another holder has something of a device; that may end soon."""


class RefusalError(Exception):
    """A refused request; the message is in the events of the Pod."""

    def __init__(self, kind: Refusal, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def grant(devices: Iterable[Device]) -> Grant:
    """Returns the grant for a container with these devices, in the order of the cards."""
    ordered = sorted(devices, key=lambda device: device.order)
    environment: dict[str, list[str]] = {}
    for device in ordered:
        for variable, texts in device.environment:
            environment.setdefault(variable, []).extend(texts)
    nodes = (
        (node, NULL if device.card.simulated else node)
        for device in ordered
        for node in (*(f"/dev/{node}" for node in device.nodes), *device.host_nodes)
    )
    return Grant(
        environment=tuple((variable, ",".join(texts)) for variable, texts in environment.items()),
        nodes=tuple(dict.fromkeys(nodes)),
        cdi_names=tuple(f"{device.card.access.cdi_kind}={device.id}" for device in ordered),
    )


def requested(
    requests: Sequence[Sequence[str]], devices: Mapping[str, Device], resource: str
) -> list[list[Device]]:
    """The devices of containers that ask for these device IDs.

    Raises:
        RefusalError: an ID is unknown, unhealthy or asked for twice, or there is none.
    """
    if not requests:
        raise RefusalError(Refusal.INVALID, f"Allocate for {resource} names no container")
    taken: set[str] = set()
    for ids in requests:
        if not ids:
            raise RefusalError(Refusal.INVALID, f"Allocate for {resource} names no device")
        for id_ in ids:
            if id_ in taken:
                raise RefusalError(Refusal.INVALID, f"device {quoted(id_)} is asked for twice")
            if id_ not in devices:
                raise RefusalError(
                    Refusal.UNKNOWN,
                    f"device {quoted(id_)} is not one of {resource} on this node now: "
                    "it was removed, disabled, cut into other parts, or has moved to DRA "
                    f"({len(devices)} are listed)",
                )
            if not devices[id_].healthy:
                what = f"device {quoted(id_)} ({devices[id_].name})"
                raise RefusalError(Refusal.UNFIT, f"{what} is unhealthy: {devices[id_].reason}")
            taken.add(id_)
    return [[devices[id_] for id_ in ids] for ids in requests]
