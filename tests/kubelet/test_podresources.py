"""Who holds what, asked of a pod-resources server that behaves and of some that do not."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from npu_agent.core.ledger import Allocation, Assignment, DeviceName, Ledger
from npu_agent.feed import Feed
from npu_agent.kubelet import podresources as assignments
from npu_agent.kubelet.podresources import Holdings, UnavailableError, fetch
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1 as wire
from tests.kubelet.test_decode import field
from tests.outputs.deviceplugin.helpers import short_directory
from tests.outputs.helpers import LivingPods
from tests.until import first, until

NPU = "beta.furiosa.ai/npu"


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


Answering = Callable[[Stream[bytes, bytes]], Awaitable[None]]
Reply = bytes | GRPCError | Answering


class Raw(bytes):
    """A message as it is, in the form that grpclib's codec asks for."""

    @classmethod
    def FromString(cls, data: bytes) -> "Raw":  # noqa: N802 (protobuf's name)
        return cls(data)

    def SerializeToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        return self


class PodResources:
    """A kubelet's pod-resources API that answers `reply`, or refuses."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.more: bytes | None = None
        """What it answers to GetAllocatableResources; None: it does not know that."""

    def __mapping__(self) -> dict[str, Handler]:
        raw, unary = Raw, Cardinality.UNARY_UNARY
        return {
            "/v1.PodResourcesLister/List": Handler(self._list, unary, raw, raw),
            "/v1.PodResourcesLister/GetAllocatableResources": Handler(self._more, unary, raw, raw),
        }

    async def _more(self, stream: Stream[bytes, bytes]) -> None:
        await stream.recv_message()
        if self.more is None:
            raise GRPCError(Status.UNIMPLEMENTED, "not here")
        await stream.send_message(Raw(self.more))

    async def _list(self, stream: Stream[bytes, bytes]) -> None:
        await stream.recv_message()
        if isinstance(self.reply, GRPCError):
            raise self.reply
        if callable(self.reply):
            await self.reply(stream)
        else:
            await stream.send_message(Raw(self.reply))


class Node(LivingPods):
    """Counts how often the kubelet's notes are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.asked = frozenset[str]()

    async def device_holders(self) -> Mapping[DeviceName, frozenset[str]]:
        self.reads += 1
        return await super().device_holders()

    async def running(self, uids: Collection[str]) -> frozenset[str]:
        self.asked = frozenset(uids)
        return await super().running(uids)


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

    async def answering(stream: Stream[bytes, bytes]) -> None:
        await stream.send_initial_metadata()
        for part in data:
            await stream._stream.send_data(part)
        await (then or ends)(stream)

    async def ends(stream: Stream[bytes, bytes]) -> None:
        await stream._stream.send_headers([("grpc-status", "0")], end_stream=True)
        stream._send_trailing_metadata_done = True

    return answering


async def hangs(_: Stream[bytes, bytes]) -> None:
    await asyncio.Event().wait()


async def hangs_up(stream: Stream[bytes, bytes]) -> None:
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


async def test_nobody_listens_on_the_socket(socket: Path) -> None:
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


async def test_what_is_known_outlives_an_answer_that_is_refused(socket: Path) -> None:
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


async def test_an_answer_comes_with_what_is_known_of_the_pods(socket: Path) -> None:
    lister = PodResources(HELD)
    async with polled(socket, lister) as kubelet:
        name = DeviceName(NPU, "U1")
        kubelet.node.notes, kubelet.node.alive = {name: frozenset({"old"})}, {"old", "other"}
        answer = await kubelet.answer()
        assert (answer.pods, answer.running) == (kubelet.node.notes, frozenset())
        # It is held and no longer listed: whether its Pod lives matters now.
        kubelet.ledger.publish(Ledger(allocations={name: Allocation(footprints=(), since=0.0)}))
        lister.reply = b""
        answer = await kubelet.answer()
        assert kubelet.node.asked == answer.running == {"old"}
        lister.reply = GRPCError(Status.UNAVAILABLE)
        refused = await kubelet.answer()
        assert (refused.pods, refused.running) == (answer.pods, answer.running)


async def test_it_is_asked_again_a_second_after_a_grant(socket: Path) -> None:
    async with polled(socket, PodResources(HELD)) as kubelet:
        await kubelet.answer()
        await asyncio.sleep(0.3)  # it has asked when it was started, too
        for _ in range(3):
            kubelet.pod_resources.ask_soon()
        began, reads = time.monotonic(), kubelet.node.reads
        await until(lambda: kubelet.node.reads > reads)
        assert time.monotonic() - began > 0.9
        assert kubelet.node.reads == reads + 1


async def test_a_node_whose_cores_are_free_is_asked_about_a_third_as_often(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def paused(every: float) -> float:
        pauses.append(every)
        return every

    monkeypatch.setattr(assignments, "until_tick", paused)
    async with polled(socket, PodResources(HELD)) as kubelet:
        await kubelet.answer()
        await until(lambda: len(pauses) == 1)
        name = DeviceName(NPU, "U1")
        kubelet.ledger.publish(Ledger(allocations={name: Allocation(footprints=(), since=0.0)}))
        await kubelet.answer()
        await until(lambda: len(pauses) == 2)
    assert pauses[0] == 3 * pauses[1]


async def test_one_grant_does_not_put_off_the_question_for_another(socket: Path) -> None:
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
        granting.cancel()


async def test_what_the_kubelet_offers(socket: Path) -> None:
    pod_resources = assignments.PodResources(socket, Feed(3600.0), LivingPods(), Feed(Ledger()))
    assert await pod_resources.offered() is None
    lister = PodResources(HELD)
    async with serving(socket, lister):
        assert await pod_resources.offered() is None  # it does not know this call
        lister.more = field(1, field(1, NPU) + field(2, "U0") + field(2, "U1"))
        assert await pod_resources.offered() == {NPU: frozenset({"U0", "U1"})}
        lister.more = b"\x0a\x7fx"
        assert await pod_resources.offered() is None
