"""Turns a node's devices into ResourceSlices and the writes for them. Pure.

Format: ``ResourceSlice`` of resource.k8s.io/v1 (k8s.io/api/resource/v1, types.go). Start reading at
`slices`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import Any

from npu_agent.core.hardware import CoreRange
from npu_agent.core.pool import Effect, PoolDevice, Value, Version
from npu_agent.core.state import COUNTERS, INFORMATIVE, TAINTS

Slice = Mapping[str, Any]
"""A ResourceSlice: one to be written, or one as the API server answers it."""

_PER_SLICE = 64
"""Devices: the API server takes 128, but no more than these once one has a taint. A list that gets
too long when a card fails would hide the failure."""
_LONGEST_NAME = 253
_SETS_PER_SLICE = 8
"""Sets of counters that the API server takes."""


def slices(
    devices: Sequence[PoolDevice], *, driver: str, node: str, uid: str, generation: int
) -> tuple[dict[str, Any], ...]:
    """The slices of a node's pool, which are complete only together; one where there is no device.

    Those with counters come first. A card's devices are in one slice, so that its failure changes
    one.

    Args:
        devices: in the order in which the scheduler is to take them.
        driver: ``npu.example.com``.
        node: the Node's name, which is the pool's as well.
        uid: the Node's; the slices are deleted with it.
        generation: of the pool. The scheduler uses only the slices of the highest one, if they are
            as many as each of them says.
    """
    sets = _counter_sets(devices)
    contents: list[dict[str, Any]] = [
        *(
            {"sharedCounters": sets[at : at + _SETS_PER_SLICE]}
            for at in range(0, len(sets), _SETS_PER_SLICE)
        ),
        *({"devices": [_device(device) for device in part]} for part in _parts(devices)),
    ]
    pool = {"name": node, "generation": generation, "resourceSliceCount": len(contents)}
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid, "controller": True}
    return tuple(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": name(at, driver, node), "ownerReferences": [owner]},
            "spec": {"driver": driver, "nodeName": node, "pool": pool, **content},
        }
        for at, content in enumerate(contents)
    )


def _parts(devices: Sequence[PoolDevice]) -> list[list[PoolDevice]]:
    """Splits devices into slices, at least one; a card's devices stay together."""
    parts: list[list[PoolDevice]] = [[]]
    for counters, together in groupby(devices, lambda device: device.counters):
        for group in [list(together)] if counters else ([device] for device in together):
            if len(parts[-1]) + len(group) > _PER_SLICE:
                parts.append([])
            parts[-1] += group
    return parts


def _counter_sets(devices: Sequence[PoolDevice]) -> list[dict[str, Any]]:
    """Returns the counters that devices share, for each card offered in several widths.

    A counter for each core is what keeps devices apart. The sums are for those who ask how much a
    device takes, such as Kueue, which reads one counter by its name.
    """
    cards = {device.counters.name: device for device in devices if device.counters}
    return [
        {"name": name, "counters": _counters(device.device.card.all_cores, device.counters.sums)}
        for name, device in cards.items()
        if device.counters
    ]


def _counters(cores: CoreRange, sums: Mapping[str, str]) -> dict[str, dict[str, str]]:
    single = {f"core-{core}": "1" for core in cores}
    return {key: {"value": value} for key, value in {**single, **sums}.items()}


def name(at: int, driver: str, node: str) -> str:
    """The name of a node's slice: always the same, so that there is no second one.

    The scheduler takes slices in the order of their names. A Node's name may have 253 characters,
    and so may a slice's: of a long one the end is a hash.
    """
    whole = f"{at:05x}-{driver}-{node}"
    if len(whole) <= _LONGEST_NAME:
        return whole
    digest = sha256(node.encode()).hexdigest()[:16]
    return f"{whole[: _LONGEST_NAME - 17].rstrip('.-')}-{digest}"


def _device(device: PoolDevice) -> dict[str, Any]:
    described = device.description
    fields: dict[str, Any] = {
        "name": device.name,
        "attributes": {key: _attribute(value) for key, value in described.attributes.items()},
        "capacity": {key: {"value": value} for key, value in described.capacity.items()},
    }
    if device.counters:
        counters = _counters(device.device.cores, described.counters)
        fields["consumesCounters"] = [{"counterSet": device.counters.name, "counters": counters}]
    if device.taints:
        fields["taints"] = [
            {"key": taint.key, "effect": taint.effect.value} for taint in device.taints
        ]
    return fields


def _attribute(value: Value) -> dict[str, Value]:
    match value:
        case bool():
            return {"bool": value}
        case int():
            return {"int": value}
        case Version():
            return {"version": str(value)}
    return {"string": value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """The writes of a pool, in order: first all deletes, then all applies.

    Of the latter, those with counters come first, then those that are there already.
    """

    delete: tuple[str, ...] = ()
    apply: tuple[Slice, ...] = ()


def writes(
    live: Mapping[str, Slice], pool: Callable[[int], Sequence[Slice]], *, generation: int = 1
) -> Writes:
    """Returns the writes that give the pool its slices.

    `live` are this driver's slices on this node by name, and `pool` gives those that are wanted, by
    their generation. `generation` is the least that the pool may have: the scheduler may know it
    already.
    """
    present = newest(live, generation)

    def of(generation: int) -> Writes:
        wanted = pool(generation)
        names = {slice_["metadata"]["name"] for slice_ in wanted}
        apply = [
            slice_
            for slice_ in wanted
            if (existing := live.get(slice_["metadata"]["name"])) is None
            or differs(existing, slice_)
        ]
        apply.sort(key=lambda it: ("devices" in it["spec"], it["metadata"]["name"] not in live))
        return Writes(delete=tuple(sorted(live.keys() - names)), apply=tuple(apply))

    changes = of(present)
    # A single call is all or nothing. Between several the pool would be a mixture of old and new
    # slices, if their generations did not tell these apart.
    return changes if len(changes.delete) + len(changes.apply) < 2 else of(present + 1)


def differs(live: Slice, wanted: Slice) -> bool:
    """Whether a slice differs from the wanted one, apart from what the API server adds."""
    owners, needed = (slice_["metadata"].get("ownerReferences") or () for slice_ in (live, wanted))
    return _plain(live.get("spec")) != _plain(wanted["spec"]) or any(
        owner not in owners for owner in needed
    )


def _plain(value: object) -> object:
    """Removes the times of taints, which the server sets, and empty values, which it omits."""
    match value:
        case Mapping():
            plain = {key: _plain(inner) for key, inner in value.items() if key != "timeAdded"}
            return {key: inner for key, inner in plain.items() if inner not in (None, [], {})}
        case list() | tuple():
            return [_plain(item) for item in value]
    return value


def dropped(sent: Slice, reply: Slice) -> tuple[str, ...]:
    """Returns fields, such as ``devices.taints``, that were sent and are not in the reply.

    The API server omits what belongs to a feature that is off; it may be off for these.
    """
    fields = (*sorted(COUNTERS), TAINTS)
    return tuple(field for field in fields if _has(sent, field) and not _has(reply, field))


def _has(slice_: Slice, field: str) -> bool:
    spec = slice_["spec"]
    devices, _, key = field.rpartition(".")
    return any(key in part for part in (spec.get(devices) or () if devices else (spec,)))


def newer(sent: Slice) -> tuple[str, ...]:
    """Returns fields, as of `dropped`, that an API server before 1.36 may refuse."""
    spec = sent["spec"]
    if "sharedCounters" in spec:
        return tuple(COUNTERS)
    effects = {taint["effect"] for _, taint in _taints(sent)}
    return (INFORMATIVE,) if Effect.NONE.value in effects else ()


def keeping_times(wanted: Slice, live: Mapping[str, Slice]) -> dict[str, Any]:
    """Returns `wanted` with the times of the live taints, in any slice.

    Else the API server would put in the time of each write, and a Pod that tolerates a taint for
    some seconds would do so again after every write.
    """
    since = {
        _named(device, taint): taint["timeAdded"]
        for slice_ in live.values()
        for device, taint in _taints(slice_)
        if "timeAdded" in taint
    }
    timed = copy.deepcopy(dict(wanted))
    for device, taint in _taints(timed):
        if time := since.get(_named(device, taint)):
            taint["timeAdded"] = time
    return timed


def _taints(slice_: Slice) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for device in slice_["spec"].get("devices") or ():
        for taint in device.get("taints") or ():
            yield device, taint


def _named(device: Mapping[str, Any], taint: Mapping[str, Any]) -> tuple[str, ...]:
    return (device["name"], *(taint.get(key) or "" for key in ("key", "effect", "value")))


def is_incomplete(live: Mapping[str, Slice]) -> bool:
    """Whether slices of the pool's newest generation are missing: the scheduler ignores it."""
    pools = [slice_["spec"]["pool"] for slice_ in live.values()]
    generation = newest(live)
    wanted = {p["resourceSliceCount"] for p in pools if p["generation"] == generation}
    return bool(pools) and wanted != {sum(p["generation"] == generation for p in pools)}


def newest(live: Mapping[str, Slice], least: int = 0) -> int:
    pools = (slice_["spec"]["pool"] for slice_ in live.values())
    return max([least, *(int(pool["generation"]) for pool in pools)])
