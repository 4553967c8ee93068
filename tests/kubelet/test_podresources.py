"""Who holds what, asked of a pod-resources server that behaves and of some that do not.

And how its answers are read: as betterproto does.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_agent.core.ledger import Allocation, Assignment, DeviceName, Ledger
from npu_agent.feed import Feed
from npu_agent.kubelet import podresources as assignments
from npu_agent.kubelet.podresources import (
    Holdings,
    UnavailableError,
    fetch,
    read_allocatable,
    read_list,
)
from npu_agent.kubelet.rpc import Encoded, UnixServer
from npu_agent.kubelet.wire import v1 as wire
from npu_agent.supervise import background
from tests.outputs.deviceplugin.helpers import short_directory
from tests.outputs.helpers import LivingPods
from tests.until import first, until

NPU = "beta.furiosa.ai/npu"


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


def pod(
    namespace: str, name: str, **containers: dict[str, list[str]] | list[wire.DynamicResource]
) -> bytes:
    """An answer with one Pod, whose containers have device IDs by resource, or claims."""
    found = [
        wire.ContainerResources(name=container, dynamic_resources=held)
        if isinstance(held, list)
        else wire.ContainerResources(
            name=container,
            devices=[
                wire.ContainerDevices(resource_name=resource, device_ids=ids)
                for resource, ids in held.items()
            ],
        )
        for container, held in containers.items()
    ]
    one = wire.PodResources(name=name, namespace=namespace, containers=found)
    return bytes(wire.ListPodResourcesResponse(pod_resources=[one]))


HELD = (
    pod("ml", "train", main={NPU: ["U2", "U1"], "example.com/nic": ["eth7"]}, side={})
    + pod("default", "infer", main={NPU: ["U0_cores_0-3"]})
    + pod("default", "idle")
)
ASSIGNED = (
    Assignment("default", "infer", "main", NPU, "U0_cores_0-3"),
    Assignment("ml", "train", "main", NPU, "U1"),
    Assignment("ml", "train", "main", NPU, "U2"),
    Assignment("ml", "train", "main", "example.com/nic", "eth7"),
)


Answering = Callable[[Stream[Encoded, Encoded]], Awaitable[None]]
Reply = bytes | GRPCError | Answering


class PodResources:
    """A kubelet's pod-resources API that answers `reply`, or refuses."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.more: bytes | None = None
        """What it answers to GetAllocatableResources; None: it does not know that."""

    def __mapping__(self) -> dict[str, Handler]:
        raw, unary = Encoded, Cardinality.UNARY_UNARY
        return {
            "/v1.PodResourcesLister/List": Handler(self._list, unary, raw, raw),
            "/v1.PodResourcesLister/GetAllocatableResources": Handler(self._more, unary, raw, raw),
        }

    async def _more(self, stream: Stream[Encoded, Encoded]) -> None:
        await stream.recv_message()
        if self.more is None:
            raise GRPCError(Status.UNIMPLEMENTED, "not here")
        await stream.send_message(Encoded(self.more))

    async def _list(self, stream: Stream[Encoded, Encoded]) -> None:
        await stream.recv_message()
        if isinstance(self.reply, GRPCError):
            raise self.reply
        if callable(self.reply):
            await self.reply(stream)
        else:
            await stream.send_message(Encoded(self.reply))


class Node(LivingPods):
    """Counts how often the kubelet's notes are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.asked = frozenset[str]()

    async def device_holders(self) -> Mapping[DeviceName, frozenset[str]]:
        self.reads += 1
        return await super().device_holders()

    async def cgroups(self, uids: Collection[str]) -> Mapping[str, bool]:
        self.asked = frozenset(uids)
        return await super().cgroups(uids)


class Polled:
    """Pod-resources as the agent polls it, each time that a test asks."""

    def __init__(self, socket: Path) -> None:
        self.node = Node()
        self.ledger = Feed(Ledger())
        self.pod_resources = assignments.PodResources(socket, Feed(3600.0), self.node, self.ledger)

    async def answer(self) -> Holdings:
        """The next answer."""
        seen = self.pod_resources.holdings.value.asked_at
        self.pod_resources.ask()
        return await first(self.pod_resources.holdings, lambda now: now.asked_at > seen)


def says(*data: bytes, then: Answering | None = None) -> Answering:
    """Answers with these bytes, as they are; then ends well, or does what `then` does."""

    async def answering(stream: Stream[Encoded, Encoded]) -> None:
        await stream.send_initial_metadata()
        for part in data:
            await stream._stream.send_data(part)
        await (then or ends)(stream)

    async def ends(stream: Stream[Encoded, Encoded]) -> None:
        await stream._stream.send_headers([("grpc-status", "0")], end_stream=True)
        stream._send_trailing_metadata_done = True

    return answering


async def hangs(_: Stream[Encoded, Encoded]) -> None:
    await asyncio.Event().wait()


async def hangs_up(stream: Stream[Encoded, Encoded]) -> None:
    stream._stream.connection.close()


def announced(length: int, *, compressed: bool = False) -> bytes:
    """What comes before a message of that length."""
    return struct.pack(">?I", compressed, length)


@pytest.fixture
async def socket() -> AsyncIterator[Path]:
    with short_directory() as directory:
        yield directory / "kubelet.sock"


@asynccontextmanager
async def serving(socket: Path, lister: PodResources) -> AsyncIterator[None]:
    server = UnixServer([lister], socket)
    await server.listen()
    try:
        yield
    finally:
        await server.shutdown()


@asynccontextmanager
async def polled(socket: Path, lister: PodResources) -> AsyncIterator[Polled]:
    """The agent's part, which asks this server."""
    found = Polled(socket)
    running = asyncio.create_task(found.pod_resources.run())
    async with serving(socket, lister):
        try:
            yield found
        finally:
            assert running.cancelling() == 0  # its own next deadline is an hour away
            running.cancel()


async def ask(socket: Path, reply: Reply) -> tuple[Assignment, ...]:
    async with serving(socket, PodResources(reply)):
        return await fetch(socket)


async def test_socket_is_missing(socket: Path) -> None:
    with pytest.raises(UnavailableError) as error:
        await fetch(socket)
    assert str(error.value) == (
        f"{socket} is missing: check that the kubelet runs and that its directory is mounted here"
    )


async def test_a_socket_without_a_listener(socket: Path) -> None:
    await asyncio.to_thread(socket.write_text, "")
    with pytest.raises(UnavailableError, match=f"{socket}: .*Connection refused"):
        await fetch(socket)


async def test_kubelet_that_never_answers(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignments, "DEADLINE", 0.1)
    async with serving(socket, PodResources(hangs)):
        with pytest.raises(UnavailableError, match=rf"{socket}: no answer within 0.1 s"):
            await fetch(socket)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit"),
            "RESOURCE_EXHAUSTED: rejected by rate limit",
        ),
        (says(announced(5, compressed=True), b"xxxxx"), "the answer is cut off, or compressed"),
        (says(announced(100), b"short"), "the answer is cut off"),
        (says(b"\0\0"), "the answer is cut off"),
        (says(), "the call ended without an answer"),
        (says(announced(100), b"short", then=hangs_up), "Connection lost"),
        (says(announced(3), b"\x0a\x7fx"), "the answer cannot be read: a field is cut off"),
    ],
)
async def test_answer_that_is_none_of_grpc(socket: Path, reply: Reply, reason: str) -> None:
    with pytest.raises(UnavailableError, match=f"{socket}: {reason}"):
        await ask(socket, reply)


USED = pod(
    "ml",
    "by-claim",
    main=[
        wire.DynamicResource(
            claim_name="two",
            claim_namespace="ml",
            claim_resources=[
                wire.ClaimResource(
                    # As a kubelet 1.36 does: npu-b's entry has npu-a's too.
                    cdi_devices=[wire.CdiDevice(name="x/claim=a")],
                    driver_name="npu.furiosa.ai",
                    pool_name="node-1",
                    device_name=device,
                )
                for device in ("npu-b", "npu-a", "npu-b")
            ],
        )
    ],
)
USES = tuple(
    Assignment("ml", "by-claim", "main", "npu.furiosa.ai", device, "two")
    for device in ("npu-a", "npu-b")
)


async def test_devices_of_claims_are_known_by_name_each_once(socket: Path) -> None:
    async with polled(socket, PodResources(USED + HELD)) as kubelet:
        holdings = await kubelet.answer()
        assert (holdings.assignments, holdings.claim_uses) == (ASSIGNED, USES)
        assert await fetch(socket) == ASSIGNED


async def test_known_holders_outlive_an_answer_that_is_refused(socket: Path) -> None:
    lister = PodResources(HELD + USED)
    async with polled(socket, lister) as kubelet:
        assert (await kubelet.answer()).assignments == ASSIGNED
        lister.reply = says(announced(100))
        holdings = await kubelet.answer()
        assert (holdings.assignments, holdings.claim_uses) == (ASSIGNED, USES)
        assert "the answer is cut off" in str(holdings.error)
        lister.reply = HELD
        holdings = await kubelet.answer()
        assert (holdings.assignments, holdings.error) == (ASSIGNED, None)
        assert holdings.claim_uses == ()
        lister.reply = says(announced(100), b"short", then=hangs_up)
        assert "Connection lost" in str((await kubelet.answer()).error)
        lister.reply = b""
        assert (await kubelet.answer()).assignments == ()


async def test_the_connection_is_kept_and_made_again_after_a_failure_or_a_restart(
    socket: Path,
) -> None:
    polled = Polled(socket)
    lister = PodResources(HELD)
    server = UnixServer([lister], socket)
    await server.listen()
    async with background(polled.pod_resources.run()):
        for _ in range(3):
            assert (await polled.answer()).error is None
        assert server.accepted.value == 1
        lister.reply = GRPCError(Status.UNAVAILABLE)
        assert (await polled.answer()).error
        lister.reply = HELD
        for _ in range(2):
            assert (await polled.answer()).error is None
        assert server.accepted.value == 2
        await server.shutdown()
        assert "is missing" in str((await polled.answer()).error)
        async with serving(socket, lister):
            assert (await polled.answer()).assignments == ASSIGNED


async def test_an_answer_comes_with_uids_and_cgroups_of_its_pods(socket: Path) -> None:
    lister = PodResources(HELD)
    async with polled(socket, lister) as kubelet:
        name = DeviceName(NPU, "U1")
        kubelet.node.notes, kubelet.node.alive = {name: frozenset({"old"})}, {"old", "other"}
        answer = await kubelet.answer()
        assert (answer.pods, answer.cgroups) == (kubelet.node.notes, {})
        # It is held and no longer listed: whether its Pod lives matters now.
        kubelet.ledger.publish(Ledger(allocations={name: Allocation(footprints=(), since=0.0)}))
        lister.reply = b""
        answer = await kubelet.answer()
        assert kubelet.node.asked == {"old"}
        assert answer.cgroups == {"old": True}
        lister.reply = GRPCError(Status.UNAVAILABLE)
        refused = await kubelet.answer()
        assert (refused.pods, refused.cgroups) == (answer.pods, answer.cgroups)


async def test_the_question_for_one_grant_is_the_one_for_the_next_and_not_put_off(
    socket: Path,
) -> None:
    """The Pod of the first one may have ended by then, and count as one that starts."""
    async with polled(socket, PodResources(HELD)) as kubelet:
        await kubelet.answer()
        await asyncio.sleep(0.3)  # it has asked when it was started, too
        reads = kubelet.node.reads

        async def grants() -> None:
            while True:
                kubelet.pod_resources.ask_soon()
                await asyncio.sleep(0.1)

        granting = asyncio.create_task(grants())
        await until(lambda: kubelet.node.reads > reads)
        assert kubelet.node.reads == reads + 1
        granting.cancel()


async def test_a_node_whose_cores_are_free_is_asked_about_a_third_as_often(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def paused(every: float) -> float:
        pauses.append(every)
        return every

    monkeypatch.setattr(assignments, "until_tick", paused)
    async with polled(socket, PodResources(HELD)) as kubelet:
        await until(lambda: len(pauses) == 1)
        name = DeviceName(NPU, "U1")
        kubelet.ledger.publish(Ledger(allocations={name: Allocation(footprints=(), since=0.0)}))
        await kubelet.answer()
        await until(lambda: len(pauses) == 2)
    assert pauses[0] == 3 * pauses[1]


async def test_devices_that_the_kubelet_can_allocate(socket: Path) -> None:
    pod_resources = assignments.PodResources(socket, Feed(3600.0), LivingPods(), Feed(Ledger()))
    assert await pod_resources.offered() is None
    lister = PodResources(HELD)
    async with serving(socket, lister):
        assert await pod_resources.offered() is None  # it does not know this call
        lister.more = field(1, field(1, NPU) + field(2, "U0") + field(2, "U1"))
        assert await pod_resources.offered() == {NPU: frozenset({"U0", "U1"})}
        lister.more = b"\x0a\x7fx"
        assert await pod_resources.offered() is None


FEW = settings(max_examples=50, deadline=None)

TEXT = st.text(max_size=200)
DEVICES = st.builds(
    wire.ContainerDevices, resource_name=TEXT, device_ids=st.lists(TEXT, max_size=3)
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
    dynamic_resources=st.lists(CLAIMS, max_size=2),
)
PODS = st.builds(
    wire.PodResources, name=TEXT, namespace=TEXT, containers=st.lists(CONTAINERS, max_size=3)
)
ANSWERS = st.builds(wire.ListPodResourcesResponse, pod_resources=st.lists(PODS, max_size=3))


def expected(response: wire.ListPodResourcesResponse) -> assignments.Listed:
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
    for read in (read_list, read_allocatable):
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
        (b"\x0a\x05abcd", "a field is cut off"),
        (b"\x51" + bytes(7), "a field is cut off"),
        (b"\x55" + bytes(3), "a field is cut off"),
        (b"\x0a" + b"\x80" * 10 + b"\x00", "the number before byte 11 has more than 64 bits"),
        (b"\x53\x54", "wire type 3 before byte 1"),
        (devices(field(1, b"\xed\xa0\x80")), "utf-8"),
    ],
)
def test_broken_answers_are_refused(answer: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_list(answer)
