"""Reads what the kubelet answers when asked who holds what.

An answer may have megabytes, and betterproto takes seconds for them (`python -m
bench.podresources`). Here only the texts that name a device and its holder are read; everything
else is skipped by its length.

Message and field numbers: protos/podresources.proto. The wire format:
https://protobuf.dev/programming-guides/encoding/. What contradicts it is refused, and so are known
fields of another wire type, and groups, which proto3 does not have.
"""

from __future__ import annotations

from collections.abc import Iterator

Row = tuple[str, str, str, str, str]
"""Namespace, Pod, container, resource, device ID."""

ClaimRow = tuple[str, str, str, str, str, str, str, str]
"""Namespace, Pod, container, the claim's namespace and name, driver, pool, device."""

MOST = 1 << 15
"""Devices that an answer may list. A node has some hundreds; with time-sliced ones, thousands.
One of a claim counts as two, as it takes up to twice the memory."""

_LENGTH_DELIMITED = 2
# A field's tag is its number << 3 | its wire type; all that is read here is length-delimited.
_1, _2, _3, _4, _5 = (number << 3 | _LENGTH_DELIMITED for number in range(1, 6))
_LARGEST_TAG = (1 << 32) - 1

_Held = list[tuple[str, str]]
"""(resource, device ID) of what one container holds."""
_Used = list[tuple[str, str, str, str, str]]
"""(claim's namespace, its name, driver, pool, device) of the claims that one container uses."""


def rows(answer: bytes | bytearray) -> Iterator[Row | ClaimRow]:
    """Yields a row for each device in a ListPodResourcesResponse, as they come, some twice.

    The kubelet lists a device once for each NUMA node it is near to, one of a claim once more for
    each time that it has prepared the claim, and everything in an order that changes each time. A
    device of a claim is known by its pool and name: of the CDI names that come with it, some are
    other devices' (kubelet 1.36).

    Raises:
        ValueError: the answer is broken, or has more than `MOST` devices; says what and where.
    """
    return _Reader(answer).response()


def allocatable(answer: bytes | bytearray) -> dict[str, frozenset[str]]:
    """The device IDs of each resource in an AllocatableResourcesResponse: what can be handed out.

    Raises:
        ValueError: as `rows`.
    """
    held: _Held = []
    _Reader(answer).allocatable(held)
    found: dict[str, set[str]] = {}
    for resource, id_ in held:
        found.setdefault(resource, set()).add(id_)
    return {resource: frozenset(ids) for resource, ids in found.items()}


class _Reader:
    """Goes through one answer. Every `at` and `end` is a place in it, in bytes."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data
        self._count = 0

    def response(self) -> Iterator[Row | ClaimRow]:
        at, end = 0, len(self._data)
        while at < end:
            tag, start, at = self._field(at, end)
            if tag == _1:
                yield from self._pod(start, at)
            elif tag < 2 << 3:
                raise _wrong_type("ListPodResourcesResponse", tag, start)

    def allocatable(self, held: _Held) -> None:
        """Adds what an AllocatableResourcesResponse lists to `held`."""
        at, end = 0, len(self._data)
        while at < end:
            tag, start, at = self._field(at, end)
            if tag == _1:
                self._devices(start, at, held)
            elif tag < 2 << 3:
                raise _wrong_type("AllocatableResourcesResponse", tag, start)

    def _pod(self, at: int, end: int) -> Iterator[Row | ClaimRow]:
        # Names may come after what they name, and of several the last one counts.
        name = namespace = ""
        containers = []
        while at < end:
            tag, start, at = self._field(at, end)
            if tag == _3:
                container, held, used = self._container(start, at)
                if held or used:
                    containers.append((container, held, used))
            elif tag == _1:
                name = self._text(start, at, "name of a Pod")
            elif tag == _2:
                namespace = self._text(start, at, "namespace of a Pod")
            elif tag < 4 << 3:
                raise _wrong_type("PodResources", tag, start)
        for container, held, used in containers:
            for device in held:
                yield namespace, name, container, *device
            for of_claim in used:
                yield namespace, name, container, *of_claim

    def _container(self, at: int, end: int) -> tuple[str, _Held, _Used]:
        """Returns its name, what it holds, and what it uses of claims."""
        name = ""
        held: _Held = []
        used: _Used = []
        while at < end:
            tag, start, at = self._field(at, end)
            if tag == _2:
                self._devices(start, at, held)
            elif tag == _1:
                name = self._text(start, at, "name of a container")
            elif tag == _5:
                self._claim(start, at, used)
            elif tag < 3 << 3 or tag >> 3 == 5:
                raise _wrong_type("ContainerResources", tag, start)
        return name, held, used

    def _devices(self, at: int, end: int, held: _Held) -> None:
        """Adds what it lists to `held`."""
        resource, ids = "", []
        while at < end:
            tag, start, at = self._field(at, end)
            if tag == _2:
                self._count += 1
                if self._count > MOST:
                    raise ValueError(f"more than {MOST:,} devices are listed")
                ids.append(self._text(start, at, "device ID"))
            elif tag == _1:
                resource = self._text(start, at, "resource name")
            elif tag < 3 << 3:
                raise _wrong_type("ContainerDevices", tag, start)
        held += ((resource, id_) for id_ in ids)

    def _claim(self, at: int, end: int, used: _Used) -> None:
        """Adds the devices of a DynamicResource to `used`."""
        name = namespace = ""
        devices = []
        while at < end:
            tag, start, at = self._field(at, end)
            if tag == _4:
                self._count += 2
                if self._count > MOST:
                    raise ValueError(f"more than {MOST:,} devices are listed")
                devices.append(self._claimed(start, at))
            elif tag == _2:
                name = self._text(start, at, "name of a claim")
            elif tag == _3:
                namespace = self._text(start, at, "namespace of a claim")
            elif 2 <= tag >> 3 <= 4:
                raise _wrong_type("DynamicResource", tag, start)
        # A claim that is not prepared yet has no devices, and which containers name it matters.
        used += ((namespace, name, *device) for device in devices or [("", "", "")])

    def _claimed(self, at: int, end: int) -> tuple[str, str, str]:
        """Returns the driver, the pool and the name of a ClaimResource."""
        driver = pool = device = ""
        while at < end:
            tag, start, at = self._field(at, end)
            if tag == _2:
                driver = self._text(start, at, "driver's name")
            elif tag == _3:
                pool = self._text(start, at, "pool's name")
            elif tag == _4:
                device = self._text(start, at, "device's name")
            elif 2 <= tag >> 3 <= 4:
                raise _wrong_type("ClaimResource", tag, start)
        return driver, pool, device

    def _field(self, at: int, end: int) -> tuple[int, int, int]:
        """The tag of the field at `at`, and where its content starts and ends."""
        data = self._data
        if at + 1 < end:  # nearly every field has a tag and a length of one byte each
            tag, stop = data[at], at + 2 + data[at + 1]
            if tag & 0x87 == _LENGTH_DELIMITED < tag and stop < at + 0x82 and stop <= end:
                return tag, at + 2, stop
        tag, start = self._varint(at, end)
        if not 1 << 3 <= tag <= _LARGEST_TAG:
            raise ValueError(f"no field has the tag {tag} at byte {at}")
        match tag & 7:
            case 2:
                length, start = self._varint(start, end)
                stop = start + length
            case 0:
                _, stop = self._varint(start, end)
            case 1:
                stop = start + 8
            case 5:
                stop = start + 4
            case other:
                raise ValueError(f"wire type {other} at byte {at}")
        if stop > end:
            raise ValueError(f"the field at byte {at} has more bytes than what it is part of")
        return tag, start, stop

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """The number at `at`, and where it ends."""
        number = 0
        for shift, place in zip(range(0, 70, 7), range(at, end), strict=False):
            byte = self._data[place]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                if number >> 64:
                    break
                return number, place + 1
        if end - at < 10:
            raise ValueError(f"the number at byte {at} is cut off")
        raise ValueError(f"the number at byte {at} has more than 64 bits")

    def _text(self, start: int, stop: int, what: str) -> str:
        try:
            return self._data[start:stop].decode()
        except UnicodeDecodeError:
            raise ValueError(f"the {what} at byte {start} is not UTF-8") from None


def _wrong_type(message: str, tag: int, at: int) -> ValueError:
    number, kind = tag >> 3, tag & 7
    return ValueError(f"field {number} of {message} has wire type {kind} before byte {at}")
