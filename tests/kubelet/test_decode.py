"""The reader of pod-resources answers: it reads what betterproto writes."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_agent.core.ledger import Assignment
from npu_agent.kubelet import decode
from npu_agent.kubelet.decode import read_list
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


def expected(response: wire.ListPodResourcesResponse) -> decode.Listed:
    held: set[Assignment] = set()
    used: set[Assignment] = set()
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = (pod.namespace, pod.name, container.name)
            held |= {
                Assignment(*holder, devices.resource_name, id_)
                for devices in container.devices
                for id_ in devices.device_ids
            }
            used |= {
                Assignment(*holder, one.driver_name, one.device_name, claim.claim_name)
                for claim in container.dynamic_resources
                for one in claim.claim_resources or [wire.ClaimResource()]
            }
    return tuple(sorted(held)), tuple(sorted(used))


def test_a_resource_with_more_allocations_than_a_node_has_cores_is_left_out() -> None:
    """Other plugins offer hundreds of thousands of devices, which took hundreds of MiB."""
    crowd = [f"fuse-{number}" for number in range(200_000)]
    devices = [
        wire.ContainerDevices(resource_name="example.com/fuse", device_ids=crowd),
        wire.ContainerDevices(resource_name="furiosa.ai/npu", device_ids=["U0", "U1"]),
    ]
    pod = wire.PodResources(
        name="pod", namespace="ns", containers=[wire.ContainerResources(name="c", devices=devices)]
    )
    answer = bytes(wire.ListPodResourcesResponse(pod_resources=[pod]))
    assigned, _ = read_list(answer)
    assert [(one.resource, one.device) for one in assigned] == [
        ("furiosa.ai/npu", "U0"),
        ("furiosa.ai/npu", "U1"),
    ]


@FEW
@given(ANSWERS)
def test_reads_what_betterproto_writes(response: wire.ListPodResourcesResponse) -> None:
    assert read_list(bytes(response)) == expected(response)


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
    for read in (read_list, decode.read_allocatable):
        with contextlib.suppress(ValueError):
            read(bytes(broken[: round(kept * len(broken))]))


def devices(*parts: bytes) -> bytes:
    """An answer with these bytes as the one container's devices."""
    return field(1, field(1, "p") + field(3, field(1, "c") + field(2, b"".join(parts))))


def held(answer: bytes) -> list[tuple[str, ...]]:
    return [
        (one.namespace, one.pod, one.container, one.resource, one.device)
        for one in read_list(answer)[0]
    ]


def test_the_order_of_fields_does_not_matter_and_of_several_names_the_last_one_counts() -> None:
    devices = field(2, "U0") + field(1, "a/b") + field(2, "U1") + field(1, "c/d")
    container = field(1, "c0") + field(2, devices) + field(1, "c1")
    pod = field(3, container) + field(1, "p0") + field(2, "n0") + field(2, "n1") + field(1, "p1")
    assert held(field(1, pod)) == [
        ("n1", "p1", "c1", "c/d", "U0"),
        ("n1", "p1", "c1", "c/d", "U1"),
    ]


def test_numbers_may_be_longer_than_they_need() -> None:
    answer = devices(b"\x92\x80\x80\x80\x00\x82\x00U0")
    assert held(answer) == [("", "p", "c", "", "U0")]


def test_fields_of_a_newer_kubelet_are_skipped() -> None:
    unknown = (
        field(15, b"\xff")
        + varint(16 << 3)
        + varint((1 << 64) - 1)
        + varint(17 << 3 | 1)
        + bytes(8)
        + varint((1 << 29) - 1 << 3 | 5)
        + bytes(4)
    )  # a field of each wire type
    assert held(unknown + devices(unknown + field(2, "U0")) + unknown) == [("", "p", "c", "", "U0")]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\x0a", "a number is cut off"),
        (b"\x80", "a number is cut off"),
        (b"\x0a\x05abcd", "a field is cut off"),
        (b"\x51" + bytes(7), "a field is cut off"),
        (b"\x55" + bytes(3), "a field is cut off"),
        (field(1, b"\x0a\x05p") + b"12345", "a field is cut off"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "a field is cut off"),
        (b"\x0a" + b"\x80" * 10 + b"\x00", "the number before byte 11 has more than 64 bits"),
        (b"\x53\x54", "wire type 3 before byte 1"),
        (devices(field(1, b"\xed\xa0\x80")), "utf-8"),
        (devices(field(2, b"\xc0\x80")), "utf-8"),
    ],
)
def test_broken_answers_are_refused(answer: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_list(answer)


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
    assert decode.read_allocatable(bytes(answer)) == expected
