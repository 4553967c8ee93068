"""Decodes the kubelet's pod-resources answers: allocations, and allocatable devices.

Plain reading of protobuf's wire format (https://protobuf.dev/programming-guides/encoding/), of the
fields that name a device and its holder: betterproto takes 0.1 ms for each device, on a full node 4
% of a core. Field numbers: protos/podresources.proto.
"""

from __future__ import annotations

from collections.abc import Iterator

from npu_agent.core.ledger import Assignment

Listed = tuple[tuple[Assignment, ...], tuple[Assignment, ...]]

MOST = 4096
"""Allocations of a resource; 64 cards of 8 cores have 512."""

_Message = dict[int, list[bytes]]
"""The contents of each length-delimited field, by its number."""


def read_list(answer: bytes) -> Listed:
    """The devices and claims in a ListPodResourcesResponse, sorted, each one once.

    The kubelet lists a device once for each near NUMA node, one of a claim once for each prepare,
    and all in an order that changes. A claim's device is known by its name: some of its CDI
    names are other devices' (kubelet 1.36). A resource with more than 4,096 allocations is left
    out: no node has so many cores, and other plugins offer hundreds of thousands of devices.

    Raises:
        ValueError: the answer is broken.
    """
    held: dict[str, set[tuple[str, ...]]] = {}
    used: set[tuple[str, ...]] = set()
    for pod in map(_message, _message(answer).get(1, ())):
        for container in map(_message, pod.get(3, ())):
            holder = _text(pod, 2), _text(pod, 1), _text(container, 1)
            for resource, id_ in _devices(container.get(2, ())):
                devices = held.setdefault(resource, set())
                if len(devices) <= MOST:
                    devices.add((*holder, resource, id_))
            used.update((*holder, *device) for device in _claimed(container.get(5, ())))
    ours = sorted(names for devices in held.values() if len(devices) <= MOST for names in devices)
    claimed = tuple(Assignment(*names) for names in sorted(used))
    return tuple(Assignment(*names) for names in ours), claimed


def read_allocatable(answer: bytes) -> dict[str, frozenset[str]]:
    """The device IDs of each resource in an AllocatableResourcesResponse; raises as `read_list`."""
    by_resource: dict[str, set[str]] = {}
    for resource, id_ in _devices(_message(answer).get(1, ())):
        by_resource.setdefault(resource, set()).add(id_)
    return {resource: frozenset(ids) for resource, ids in by_resource.items()}


def _devices(messages: list[bytes] | tuple[()]) -> Iterator[tuple[str, str]]:
    for devices in map(_message, messages):
        resource = _text(devices, 1)
        for id_ in devices.get(2, ()):
            yield resource, id_.decode()


def _claimed(messages: list[bytes] | tuple[()]) -> Iterator[tuple[str, ...]]:
    """The driver and name of each device, and the name of its claim."""
    for claim in map(_message, messages):
        # A claim that is not prepared yet has no devices, and which containers name it matters.
        for device in map(_message, claim.get(4) or [b""]):
            yield _text(device, 2), _text(device, 4), _text(claim, 2)


def _text(message: _Message, field: int) -> str:
    """Returns the text of a field: the last of several, empty if there is none."""
    return message[field][-1].decode() if field in message else ""


def _message(data: bytes) -> _Message:
    fields: _Message = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                length, start = _varint(data, at)
                at = start + length
                fields.setdefault(tag >> 3, []).append(data[start:at])
            case 5:
                at += 4
            case other:
                raise ValueError(f"wire type {other} before byte {at}")
    if at > len(data):
        raise ValueError("a field is cut off")
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("a number is cut off")
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
    raise ValueError(f"the number before byte {at} has more than 64 bits")
