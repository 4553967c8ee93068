"""No core to two containers, also where devices were cut otherwise before: pure.

The kubelet counts devices by resource and ID. When `defaultPe` changes, it knows nothing of a new
device's having cores in common with an old one that a Pod still holds; and when a resource is
renamed, not even that it is the same device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from npu_agent.core.hardware import CoreRange
from npu_agent.core.offer import Device, split_id


@dataclass(frozen=True, slots=True)
class Held:
    """A device in use, maybe under a shape or a resource of before."""

    resource: str
    device: str
    by: str
    """For people: ``Pod namespace/name``."""


def reserve(
    devices: tuple[Device, ...], resource: str, held: Collection[Held]
) -> tuple[Device, ...]:
    """The same devices of `resource`; those with cores that another's holder has are unfit."""
    by_card: dict[str, list[tuple[CoreRange | None, Held]]] = {}
    for one in held:
        card, cores = split_id(one.device)
        by_card.setdefault(card, []).append((cores, one))
    return tuple(_checked(device, resource, by_card) for device in devices)


def _checked(
    device: Device, resource: str, by_card: Mapping[str, list[tuple[CoreRange | None, Held]]]
) -> Device:
    for cores, one in by_card.get(device.card_id, ()):
        if one.device == device.id and one.resource == resource:
            continue  # the kubelet knows
        if cores is None or cores.overlaps(device.cores):
            reason = f"{one.by} still holds its cores as {one.device} of {one.resource}"
            return replace(device, healthy=False, reason=reason)
    return device
