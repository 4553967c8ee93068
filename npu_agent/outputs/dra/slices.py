"""The devices of a node as ResourceSlices, and what has to be written to bring those about. Pure.

Format: ``ResourceSlice`` of resource.k8s.io/v1 (k8s.io/api/resource/v1, types.go). Start reading at
`slices`; `npu_agent.outputs.dra.publisher` writes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_agent.core.pool import PoolDevice, Taint, Value, Version

Slice = Mapping[str, Any]
"""A ResourceSlice: one to be written, or one as the API server answers it."""

_PER_SLICE = 64
"""Devices: the API server takes 128, but no more than these once one of them has a taint. A list
that becomes too long just as a card fails would keep the failure from being published."""
_LONGEST_NAME = 253
TAINTS = "devices.taints"
"""What `dropped` calls the taints of devices."""


def slices(
    devices: Sequence[PoolDevice], *, driver: str, node: str, uid: str, generation: int
) -> tuple[dict[str, Any], ...]:
    """The slices of a node's pool, which are complete only together; one where there is no device.

    Args:
        devices: in the order in which the scheduler is to take them.
        driver: ``npu.example.com``.
        node: the Node's name, which is the pool's as well.
        uid: the Node's; the slices are deleted with it.
        generation: of the pool. The scheduler uses the slices of the highest one only, and those
            only if they are as many as each of them says.
    """
    parts = [devices[at : at + _PER_SLICE] for at in range(0, len(devices), _PER_SLICE)] or [()]
    pool = {"name": node, "generation": generation, "resourceSliceCount": len(parts)}
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid, "controller": True}
    return tuple(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": name(at, driver, node), "ownerReferences": [owner]},
            "spec": {
                "driver": driver,
                "nodeName": node,
                "pool": pool,
                "devices": [_device(each) for each in part],
            },
        }
        for at, part in enumerate(parts)
    )


def name(at: int, driver: str, node: str) -> str:
    """The name of a node's slice: the same each time, so that a second one can never be created.

    The scheduler takes slices in the order of their names.
    """
    whole = f"{at:05x}-{driver}-{node}"
    if len(whole) <= _LONGEST_NAME:
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"{whole[: _LONGEST_NAME - 17].rstrip('.-')}-{digest}"


def _device(each: PoolDevice) -> dict[str, Any]:
    described = each.description
    found: dict[str, Any] = {
        "name": each.name,
        "attributes": {key: _attribute(value) for key, value in described.attributes.items()},
        "capacity": {key: {"value": value} for key, value in described.capacity.items()},
    }
    if each.taints:
        found["taints"] = [_taint(taint) for taint in each.taints]
    return found


def _attribute(value: Value) -> dict[str, Value]:
    match value:
        case bool():
            return {"bool": value}
        case int():
            return {"int": value}
        case Version():
            return {"version": str(value)}
    return {"string": value}


def _taint(taint: Taint) -> dict[str, str]:
    found = {"key": taint.key, "effect": taint.effect.value}
    if taint.value:
        found["value"] = taint.value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The calls that bring a pool about, in their order: first all to delete, then all to apply."""

    delete: tuple[str, ...] = ()
    """Names."""
    apply: tuple[Slice, ...] = ()


def plan(
    live: Mapping[str, Slice],
    devices: Sequence[PoolDevice],
    *,
    driver: str,
    node: str,
    uid: str,
    generation: int = 1,
) -> Plan:
    """What has to be written so that the pool has these devices; nothing where it has them.

    Args:
        live: by name, the slices that this driver has on this node.
        devices: see `slices`.
        driver: see `slices`.
        node: see `slices`.
        uid: see `slices`.
        generation: the least one that the pool may have: the scheduler may know it already.
    """
    present = newest(live, generation)

    def of(generation: int) -> Plan:
        wanted = slices(devices, driver=driver, node=node, uid=uid, generation=generation)
        names = {each["metadata"]["name"] for each in wanted}
        return Plan(
            delete=tuple(sorted(live.keys() - names)),
            apply=tuple(
                each
                for each in wanted
                if (found := live.get(each["metadata"]["name"])) is None or differs(found, each)
            ),
        )

    found = of(present)
    # A single call is all or nothing. Between several the pool would be a mixture of old and new
    # slices, if their generations did not tell these apart.
    return found if len(found.delete) + len(found.apply) < 2 else of(present + 1)


def differs(live: Slice, wanted: Slice) -> bool:
    """Whether a slice is not as it should be; what the API server adds to it does not count."""
    owners, needed = (each["metadata"].get("ownerReferences") or () for each in (live, wanted))
    return _plain(live.get("spec")) != _plain(wanted["spec"]) or any(
        owner not in owners for owner in needed
    )


def _plain(value: object) -> object:
    """Without the times of taints, which the server sets, and what is empty, which it omits."""
    match value:
        case Mapping():
            plain = {key: _plain(each) for key, each in value.items() if key != "timeAdded"}
            return {key: each for key, each in plain.items() if each not in (None, [], {})}
        case list() | tuple():
            return [_plain(each) for each in value]
    return value


def dropped(sent: Slice, reply: Slice) -> tuple[str, ...]:
    """The fields, such as ``devices.taints``, that were sent and that the reply does not have.

    The API server omits without a word what belongs to a feature that is switched off.
    """
    return tuple(sorted(set(_missing(sent["spec"], reply.get("spec"), ""))))


def _missing(sent: object, reply: object, path: str) -> Iterator[str]:
    match sent, reply:
        case Mapping(), Mapping():
            for key, value in sent.items():
                within = f"{path}.{key}" if path else key
                if key in reply:
                    yield from _missing(value, reply[key], within)
                elif value not in (None, [], {}):
                    yield within
        case [list(), list()]:
            for one, other in zip(sent, reply, strict=False):
                yield from _missing(one, other, path)


def keeping_times(wanted: Slice, live: Mapping[str, Slice]) -> dict[str, Any]:
    """`wanted` with the time since when each taint is there, for the taints that are live.

    Without it the API server would put in the time of each write, and Pods that tolerate a taint
    for some seconds would tolerate it for that long after every write.

    Args:
        wanted: the slice to write.
        live: by name, the slices that are there; a device may have been in another one of them.
    """
    since = {
        (device["name"], *_what(taint)): taint["timeAdded"]
        for each in live.values()
        for device in each["spec"].get("devices") or ()
        for taint in device.get("taints") or ()
        if "timeAdded" in taint
    }

    def timed(device: Mapping[str, Any]) -> dict[str, Any]:
        if "taints" not in device:
            return dict(device)
        times = [since.get((device["name"], *_what(taint))) for taint in device["taints"]]
        return {
            **device,
            "taints": [
                {**taint, "timeAdded": time} if time else taint
                for taint, time in zip(device["taints"], times, strict=True)
            ],
        }

    spec = wanted["spec"]
    return {**wanted, "spec": {**spec, "devices": [timed(each) for each in spec["devices"]]}}


def _what(taint: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(taint.get(key) or "" for key in ("key", "effect", "value"))


def newest(live: Mapping[str, Slice], least: int = 0) -> int:
    """The highest generation of the pool in these slices, or `least`."""
    pools = (each["spec"]["pool"] for each in live.values())
    return max([least, *(int(pool["generation"]) for pool in pools)])
