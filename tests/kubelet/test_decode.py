"""The reader of pod-resources answers: as good as betterproto's, and stricter."""

import contextlib
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_agent.kubelet import decode as podresources
from npu_agent.kubelet.decode import ClaimRow, Row, rows
from npu_agent.kubelet.wire import v1 as wire

FEW = settings(max_examples=50, deadline=None)

TEXT = st.text(max_size=200)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TOPOLOGY = st.none() | st.builds(
    wire.TopologyInfo, nodes=st.lists(st.builds(wire.NumaNode, id=INT64), max_size=2)
)
DEVICES = st.builds(
    wire.ContainerDevices,
    resource_name=TEXT,
    device_ids=st.lists(TEXT, max_size=3),
    topology=TOPOLOGY,
)
MEMORY = st.builds(
    wire.ContainerMemory,
    memory_type=TEXT,
    size=st.integers(0, (1 << 64) - 1),
    topology=TOPOLOGY,
)
CLAIMED = st.builds(
    wire.ClaimResource,
    cdi_devices=st.lists(st.builds(wire.CdiDevice, name=TEXT), max_size=2),
    driver_name=TEXT,
    pool_name=TEXT,
    device_name=TEXT,
    share_id=st.none() | TEXT,
)
CLAIMS = st.builds(
    wire.DynamicResource,
    claim_name=TEXT,
    claim_namespace=TEXT,
    claim_resources=st.lists(CLAIMED, max_size=3),
)
CONTAINERS = st.builds(
    wire.ContainerResources,
    name=TEXT,
    devices=st.lists(DEVICES, max_size=3),
    cpu_ids=st.lists(INT64, max_size=4),
    memory=st.lists(MEMORY, max_size=2),
    dynamic_resources=st.lists(CLAIMS, max_size=2),
)
PODS = st.builds(
    wire.PodResources, name=TEXT, namespace=TEXT, containers=st.lists(CONTAINERS, max_size=3)
)
ANSWERS = st.builds(wire.ListPodResourcesResponse, pod_resources=st.lists(PODS, max_size=3))


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def field(number: int, content: bytes | str) -> bytes:
    """A length-delimited field."""
    content = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(content)) + content


UNKNOWN = (
    field(15, "a newer kubelet's")
    + varint(16 << 3)
    + varint((1 << 64) - 1)
    + varint(17 << 3 | 1)
    + bytes(8)
    + varint((1 << 29) - 1 << 3 | 5)
    + bytes(4)
)
"""A field of each wire type, none of them ours."""


def read(answer: bytes | bytearray) -> list[Row | ClaimRow]:
    return sorted(row for row in rows(answer) if row is not None)


def expected(response: wire.ListPodResourcesResponse) -> list[Row | ClaimRow]:
    listed: list[Row | ClaimRow] = []
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = (pod.namespace, pod.name, container.name)
            listed += [
                (*holder, devices.resource_name, id_)
                for devices in container.devices
                for id_ in devices.device_ids
            ]
            listed += [
                (
                    *holder,
                    claim.claim_namespace,
                    claim.claim_name,
                    one.driver_name,
                    one.pool_name,
                    one.device_name,
                )
                for claim in container.dynamic_resources
                for one in claim.claim_resources or [wire.ClaimResource()]
            ]
    return sorted(listed)


@FEW
@given(ANSWERS)
def test_reads_what_betterproto_writes(response: wire.ListPodResourcesResponse) -> None:
    answer = bytes(response)
    assert read(answer) == expected(response)
    assert read(bytearray(answer)) == expected(wire.ListPodResourcesResponse().parse(answer))


_INNER = {(1, 1): 2, (2, 3): 3, (3, 2): 4, (3, 5): 5, (5, 4): 6}
"""Message and field -> the message that the field is. 1 is the answer, then Pod, container, its
devices, its claim, and a device of that."""


def shuffled(message: bytes, turn: random.Random, nested: int) -> bytes:
    """The same fields in another order, with fields that nobody knows between them."""
    reader = podresources._Reader(message)
    at, parts = 0, [UNKNOWN]
    while at < len(message):
        began = at
        tag, start, at = reader._field(at, len(message))
        inner = _INNER.get((nested, tag >> 3)) if tag & 7 == 2 else None
        content = message[start:at]
        parts.append(
            field(tag >> 3, shuffled(content, turn, inner)) if inner else message[began:at]
        )
    turn.shuffle(parts)
    return b"".join(parts)


@FEW
@given(ANSWERS, st.randoms(use_true_random=False))
def test_order_and_unknown_fields_do_not_matter(
    response: wire.ListPodResourcesResponse, turn: random.Random
) -> None:
    assert read(shuffled(bytes(response), turn, 1)) == expected(response)


@FEW
@given(
    ANSWERS.map(bytes).filter(bool),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
)
def test_a_broken_answer_is_read_or_refused(
    answer: bytes, changes: list[tuple[float, int]], kept: float
) -> None:
    broken = bytearray(answer)
    for place, byte in changes:
        broken[int(place * len(broken))] = byte
    del broken[round(kept * len(broken)) :]
    steps = 0
    with contextlib.suppress(ValueError):
        for _ in rows(broken):
            steps += 1
    assert steps <= len(broken)


@FEW
@given(st.binary(max_size=400))
def test_garbage_is_read_or_refused(garbage: bytes) -> None:
    with contextlib.suppress(ValueError):
        read(garbage)


@FEW
@given(ANSWERS, st.lists(st.floats(0, 1), min_size=20, max_size=20))
def test_a_truncated_answer_is_refused_but_between_pods(
    response: wire.ListPodResourcesResponse, places: list[float]
) -> None:
    ends, at = set(), 0
    for pod in response.pod_resources:
        at += len(field(1, bytes(pod)))
        ends.add(at)
    answer = bytes(response)
    for length in {0, *ends, *(round(place * len(answer)) for place in places)}:
        if length in {0, *ends}:
            read(answer[:length])
        else:
            with pytest.raises(ValueError, match="byte"):
                read(answer[:length])


def devices(*parts: bytes) -> bytes:
    """An answer with these bytes as the one container's devices."""
    return field(1, field(1, "p") + field(3, field(1, "c") + field(2, b"".join(parts))))


def claims(*parts: bytes) -> bytes:
    """An answer with these bytes as the one container's one claim."""
    return field(1, field(3, field(5, b"".join(parts))))


def test_of_several_names_the_last_one_counts() -> None:
    held = field(2, "U0") + field(1, "a/b") + field(2, "U1") + field(1, "c/d")
    container = field(1, "c0") + field(2, held) + field(1, "c1")
    pod = field(3, container) + field(1, "p0") + field(2, "n0") + field(2, "n1") + field(1, "p1")
    assert read(field(1, pod)) == [
        ("n1", "p1", "c1", "c/d", "U0"),
        ("n1", "p1", "c1", "c/d", "U1"),
    ]


def test_absent_texts_are_empty() -> None:
    assert read(field(1, field(3, field(2, field(2, ""))))) == [("", "", "", "", "")]


def test_numbers_may_be_longer_than_they_need() -> None:
    assert read(b"\x8a\x00\x84\x80\x00" + field(1, "ab")) == []
    assert read(devices(b"\x92\x80\x80\x80\x00\x82\x00U0")) == [("", "p", "c", "", "U0")]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\x0a", "the number at byte 1 is cut off"),
        (b"\x0a\x80", "the number at byte 1 is cut off"),
        (b"\x80", "the number at byte 0 is cut off"),
        (field(9, bytes(20)) + b"\x80", "the number at byte 22 is cut off"),
        (b"\x0a\x05abcd", "the field at byte 0 has more bytes than what it is part of"),
        (field(9, b"") + b"\x0a\x7f", "the field at byte 2 has more bytes than what it is part of"),
        (b"\x51" + bytes(7), "the field at byte 0 has more bytes than what it is part of"),
        (b"\x55" + bytes(3), "the field at byte 0 has more bytes than what it is part of"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "the field at byte 0 has more bytes than"),
        (b"\x0a" + b"\xff" * 9 + b"\x02", "the number at byte 1 has more than 64 bits"),
        (b"\x0a" + b"\x80" * 10 + b"\x00", "the number at byte 1 has more than 64 bits"),
        (b"\x50" + b"\xff" * 20, "the number at byte 1 has more than 64 bits"),
        (b"\x02\x00", "no field has the tag 2 at byte 0"),
        (varint(1 << 32 | 2) + b"\x00", "no field has the tag 4294967298 at byte 0"),
        (b"\x53\x54", "wire type 3 at byte 0"),
        (b"\x54", "wire type 4 at byte 0"),
        (b"\x56", "wire type 6 at byte 0"),
        (b"\x57", "wire type 7 at byte 0"),
        (b"\x08\x01", "field 1 of ListPodResourcesResponse has wire type 0 before byte 1"),
        (field(1, b"\x10\x01"), "field 2 of PodResources has wire type 0 before byte 3"),
        (
            field(1, field(3, b"\x15" + bytes(4))),
            "field 2 of ContainerResources has wire type 5 before byte 5",
        ),
        (devices(b"\x11" + bytes(8)), "field 2 of ContainerDevices has wire type 1 before byte 13"),
        (
            field(1, field(3, b"\x28\x01")),
            "field 5 of ContainerResources has wire type 0 before byte 5",
        ),
        (claims(b"\x20\x01"), "field 4 of DynamicResource has wire type 0 before byte 7"),
        (claims(field(4, b"\x10\x01")), "field 2 of ClaimResource has wire type 0 before byte 9"),
        (field(1, field(1, b"\xff")), "the name of a Pod at byte 4 is not UTF-8"),
        (field(1, field(2, b"\xff")), "the namespace of a Pod at byte 4 is not UTF-8"),
        (field(1, field(3, field(1, b"\xff"))), "the name of a container at byte 6 is not UTF-8"),
        (devices(field(1, b"\xed\xa0\x80")), "the resource name at byte 14 is not UTF-8"),
        (devices(field(2, b"\xc0\x80")), "the device ID at byte 14 is not UTF-8"),
        (claims(field(2, b"\xff")), "the name of a claim at byte 8 is not UTF-8"),
        (claims(field(3, b"\xff")), "the namespace of a claim at byte 8 is not UTF-8"),
        (claims(field(4, field(2, b"\xff"))), "the driver's name at byte 10 is not UTF-8"),
        (claims(field(4, field(3, b"\xff"))), "the pool's name at byte 10 is not UTF-8"),
        (claims(field(4, field(4, b"\xff"))), "the device's name at byte 10 is not UTF-8"),
        (claims(field(4, b"\x12\x7f")), "the field at byte 8 has more bytes than"),
        # What the parts say of their length, and what the whole has.
        (field(1, b"\x0a\x05p") + b"12345", "the field at byte 2 has more bytes than"),
    ],
)
def test_broken_answers_are_refused(answer: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(answer)


def test_what_is_not_ours_is_not_looked_at() -> None:
    topology = field(3, b"\xff" * 100)
    cpus = field(3, b"\xff" * 30) + b"\x18\x07"  # packed or not
    cdi = field(1, b"\xff") + field(4, "npu-0") + field(5, b"\xff")
    claim = field(5, b"\x08\x01" + field(2, "k") + field(4, cdi) + field(5, b"\xff"))
    held = field(2, field(2, "U0") + topology)
    container = field(1, "c") + held + cpus + claim + field(6, "\0")
    assert read(field(1, field(3, container))) == [
        ("", "", "c", "", "U0"),
        ("", "", "c", "", "k", "", "", "npu-0"),
    ]


@pytest.mark.parametrize(
    "listed",
    [
        lambda id_: devices(id_) * 11,
        lambda id_: devices(id_ * 11),
        lambda id_: field(1, field(3, field(2, id_) * 11)),
    ],
)
def test_there_is_a_limit_to_devices(
    listed: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(podresources, "MOST", 11)
    assert len(read(listed(field(2, "U0")))) == 11
    monkeypatch.setattr(podresources, "MOST", 10)
    with pytest.raises(ValueError, match="more than 10 devices are listed"):
        read(listed(field(2, "U0")))


@pytest.mark.parametrize(
    "listed",
    [
        lambda device: claims(device) * 5,
        lambda device: claims(device * 5),
        lambda device: field(1, field(3, field(5, device) * 5)),
        lambda device: claims(device * 4) + devices(field(2, "U0") * 2),
    ],
)
def test_a_device_of_a_claim_counts_as_two(
    listed: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(podresources, "MOST", 10)
    assert len(read(listed(field(4, field(4, "npu-0"))))) in (5, 6)
    monkeypatch.setattr(podresources, "MOST", 9)
    with pytest.raises(ValueError, match="more than 9 devices are listed"):
        read(listed(field(4, field(4, "npu-0"))))


@FEW
@given(
    st.builds(
        wire.AllocatableResourcesResponse,
        devices=st.lists(DEVICES, max_size=4),
        cpu_ids=st.lists(INT64, max_size=4),
        memory=st.lists(MEMORY, max_size=2),
    )
)
def test_what_can_be_handed_out_is_read_as_betterproto_does(
    answer: wire.AllocatableResourcesResponse,
) -> None:
    expected: dict[str, set[str]] = {}
    for devices in answer.devices:
        for id_ in devices.device_ids:
            expected.setdefault(devices.resource_name, set()).add(id_)
    assert podresources.allocatable(bytes(answer)) == expected


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader_of_what_can_be_handed_out(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        podresources.allocatable(data)
