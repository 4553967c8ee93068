"""Who holds what, asked of a pod-resources server that behaves and of some that do not."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path

import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from npu_agent.core.claim import ClaimUse
from npu_agent.core.ledger import Assignment, DeviceName
from npu_agent.feed import Feed
from npu_agent.kubelet import podresources as assignments
from npu_agent.kubelet.podresources import (
    Holdings,
    UnavailableError,
    decode,
    fetch,
    offered,
    socket_beside,
)
from npu_agent.kubelet.pods import Pods
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1 as wire
from tests.kubelet.test_decode import field
from tests.outputs.deviceplugin.helpers import short_directory
from tests.until import first, until

NPU = "beta.furiosa.ai/npu"


def answer(*pods: tuple[str, str, dict[str, dict[str, list[str]]]]) -> bytes:
    """Of pods as (namespace, name, {container: {resource: [device ID]}})."""
    return bytes(
        wire.ListPodResourcesResponse(
            pod_resources=[
                wire.PodResources(
                    name=name,
                    namespace=namespace,
                    containers=[
                        wire.ContainerResources(
                            name=container,
                            devices=[
                                wire.ContainerDevices(resource_name=resource, device_ids=ids)
                                for resource, ids in held.items()
                            ],
                        )
                        for container, held in containers.items()
                    ],
                )
                for namespace, name, containers in pods
            ]
        )
    )


HELD = answer(
    ("ml", "train", {"main": {NPU: ["U2", "U1"], "example.com/nic": ["eth7"]}, "side": {}}),
    ("default", "infer", {"main": {NPU: ["U0_cores_0-3"]}}),
    ("default", "idle", {}),
)
ASSIGNED = (
    Assignment("default", "infer", "main", NPU, "U0_cores_0-3"),
    Assignment("ml", "train", "main", NPU, "U1"),
    Assignment("ml", "train", "main", NPU, "U2"),
    Assignment("ml", "train", "main", "example.com/nic", "eth7"),
)


Answering = Callable[[Stream[bytes, bytes]], Awaitable[None]]
Reply = bytes | GRPCError | Answering | None


class Raw(bytes):
    """A message as it is, in the form that grpclib's codec asks for."""

    @classmethod
    def FromString(cls, data: bytes) -> "Raw":  # noqa: N802 (protobuf's name)
        return cls(data)

    def SerializeToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        return self


class PodResources:
    """A kubelet's pod-resources API that answers `reply`, refuses, or never answers (None)."""

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
        if self.reply is None:
            await asyncio.Event().wait()
        if isinstance(self.reply, GRPCError):
            raise self.reply
        if callable(self.reply):
            await self.reply(stream)
        else:
            await stream.send_message(Raw(self.reply or b""))


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


async def ask(socket: Path, reply: Reply) -> tuple[Assignment, ...]:
    server = UnixServer([PodResources(reply)], socket)
    await server.listen()
    try:
        return await fetch(socket)
    finally:
        await server.shutdown()


def test_socket_is_beside_the_plugin_directory() -> None:
    found = socket_beside(Path("/var/lib/kubelet/device-plugins"))
    assert found == Path("/var/lib/kubelet/pod-resources/kubelet.sock")


async def test_assignments_are_sorted_and_complete(socket: Path) -> None:
    assert await ask(socket, HELD) == ASSIGNED


async def test_nobody_holds_anything(socket: Path) -> None:
    assert await ask(socket, b"") == ()


async def test_answer_of_more_than_4_mib(socket: Path) -> None:
    large = answer(("n", "p", {"c": {NPU: [f"{index:01000000}" for index in range(5)]}}))
    assert len(large) > 4 << 20
    assert len(await ask(socket, large)) == 5


async def test_socket_is_missing(socket: Path) -> None:
    with pytest.raises(UnavailableError) as error:
        await fetch(socket)
    assert str(error.value) == (
        f"{socket} is missing: is the kubelet running, and is its directory mounted here?"
    )


async def test_nobody_listens_on_the_socket(socket: Path) -> None:
    await asyncio.to_thread(socket.write_text, "")
    with pytest.raises(UnavailableError, match=f"{socket}: .*Connection refused"):
        await fetch(socket)


async def test_kubelet_that_never_answers(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignments, "_DEADLINE", 0.1)
    with pytest.raises(UnavailableError, match=rf"{socket}: no answer within 0.1 s"):
        await ask(socket, None)


async def test_kubelet_that_refuses(socket: Path) -> None:
    refusal = GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
    with pytest.raises(UnavailableError, match="RESOURCE_EXHAUSTED: rejected by rate limit"):
        await ask(socket, refusal)


async def test_answer_that_is_none(socket: Path) -> None:
    with pytest.raises(UnavailableError, match="not a ListPodResourcesResponse: "):
        await ask(socket, b"\xff" * 11)


async def test_server_that_speaks_another_language(socket: Path) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.com ESMTP\r\n")
        writer.close()

    async with await asyncio.start_unix_server(greet, socket):
        with pytest.raises(UnavailableError) as error:
            await fetch(socket)
    reason = str(error.value).removeprefix(f"{socket}: ")
    assert reason  # whatever it is, it is not empty


async def test_answer_in_many_pieces(socket: Path) -> None:
    whole = announced(len(HELD)) + HELD
    assert await ask(socket, says(*(whole[at : at + 1] for at in range(len(whole))))) == ASSIGNED


async def test_too_large_an_answer_is_refused_before_it_has_come(socket: Path) -> None:
    with pytest.raises(UnavailableError) as error:
        await ask(socket, says(announced((1 << 32) - 1), then=hangs))
    assert str(error.value) == (
        f"{socket}: the answer has 4,294,967,295 bytes, and the limit is 8,388,608"
    )


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (says(announced(5, compressed=True), b"xxxxx"), "the answer is compressed"),
        (says(announced(100)), "the answer is cut off"),
        (says(announced(100), b"short"), "the answer is cut off"),
        (says(b"\0\0"), "the answer is cut off"),
        (says(), "the call ended without an answer"),
        (says(announced(100), b"short", then=hangs_up), "Connection lost"),
        (says(announced(3), b"\x0a\x7fx"), "not a ListPodResourcesResponse: the field at byte 0"),
    ],
)
async def test_answer_that_is_none_of_grpc(socket: Path, reply: Reply, reason: str) -> None:
    with pytest.raises(UnavailableError, match=f"{socket}: {reason}"):
        await ask(socket, reply)


async def test_reading_an_answer_has_a_deadline(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignments, "_DEADLINE", 0.0)
    with pytest.raises(UnavailableError, match="an answer of 2,000,000 bytes could not be read"):
        await assignments._decoded(socket, bytearray(field(9, b"") * 1_000_000))


USED = bytes(
    wire.ListPodResourcesResponse(
        pod_resources=[
            wire.PodResources(
                name="by-claim",
                namespace="ml",
                containers=[
                    wire.ContainerResources(
                        name="main",
                        dynamic_resources=[
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
                ],
            )
        ]
    )
)
USES = tuple(
    ClaimUse("ml", "by-claim", "main", "ml", "two", "npu.furiosa.ai", "node-1", device)
    for device in ("npu-a", "npu-b")
)


async def test_devices_of_claims_are_known_by_pool_and_name_each_once(socket: Path) -> None:
    server = UnixServer([PodResources(USED + HELD)], socket)
    await server.listen()
    pod_resources = assignments.PodResources(socket, Feed(3600.0))
    running = asyncio.create_task(pod_resources.run())
    try:
        holdings = await first(pod_resources.holdings, lambda now: now.asked_at)
        assert (holdings.assignments, holdings.claim_uses) == (ASSIGNED, USES)
        assert await fetch(socket) == ASSIGNED
    finally:
        running.cancel()
        await server.shutdown()


async def test_it_is_asked_seldom_while_there_can_be_no_news(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lister = PodResources(HELD)
    server = UnixServer([lister], socket)
    await server.listen()
    pod_resources = assignments.PodResources(socket, Feed(5.0))
    pauses = list[float]()

    def pause(interval: float) -> float:
        pauses.append(interval)
        return 0.01

    monkeypatch.setattr(assignments, "until_tick", pause)
    running = asyncio.create_task(pod_resources.run())

    async def next_pause() -> float:
        seen = len(pauses)
        await until(lambda: len(pauses) > seen + 1)
        return pauses[-1]

    assert await next_pause() == 5.0
    pod_resources.no_news = lambda: True
    assert await next_pause() == 15.0
    lister.reply = GRPCError(Status.UNAVAILABLE)  # that it answers again is news
    assert await next_pause() == 5.0
    running.cancel()
    await server.shutdown()


async def test_what_is_known_outlives_an_answer_that_is_refused(socket: Path) -> None:
    lister = PodResources(HELD + USED)
    server = UnixServer([lister], socket)
    await server.listen()
    pod_resources = assignments.PodResources(socket, Feed(3600.0))
    running = asyncio.create_task(pod_resources.run())

    async def told() -> Holdings:
        seen = pod_resources.holdings.value.asked_at
        pod_resources.ask()
        async with asyncio.timeout(20):
            async for holdings in pod_resources.holdings.watch():
                if holdings.asked_at > seen:
                    return holdings
        raise AssertionError

    try:
        assert await told() == Holdings(
            assignments=ASSIGNED,
            claim_uses=USES,
            asked_at=pod_resources.holdings.value.asked_at,
        )
        lister.reply = says(announced(1 << 30), then=hangs)
        holdings = await told()
        assert (holdings.assignments, holdings.claim_uses) == (ASSIGNED, USES)
        assert "the answer has 1,073,741,824 bytes" in str(holdings.error)
        lister.reply = HELD
        holdings = await told()
        assert (holdings.assignments, holdings.error) == (ASSIGNED, None)
        assert holdings.claim_uses == ()
        lister.reply = says(announced(100), b"short", then=hangs_up)
        assert "Connection lost" in str((await told()).error)
        lister.reply = b""
        assert (await told()).assignments == ()
        # Else a deadline that passes later would be taken for the end (supervise.py).
        assert running.cancelling() == 0  # its own next deadline is an hour away
    finally:
        running.cancel()
        await server.shutdown()


def test_thousands_of_devices_are_sorted_and_each_is_there_once() -> None:
    # As many as make several runs, in the order of a Go map; a kubelet lists a device once for
    # each NUMA node it is near to.
    pods = [f"pod-{index}" for index in range(7)]
    held = [(pod, f"{index:04}") for pod in pods for index in range(500)] * 2
    random.Random(0).shuffle(held)
    listed = b"".join(
        field(1, field(1, pod) + field(2, "n") + field(3, field(1, "c") + field(2, devices)))
        for pod, id_ in held
        for devices in (field(1, NPU) + field(2, id_),)
    )
    expected = sorted(Assignment("n", pod, "c", NPU, id_) for pod, id_ in set(held))
    assert list(decode(listed)) == expected


def test_two_pods_of_one_name_are_one() -> None:
    """As of a StatefulSet, while the one that has ended is still listed."""
    both = answer(("n", "p", {"c": {NPU: ["U0"]}}), ("n", "p", {"c": {NPU: ["U0", "U1"]}}))
    assert [one.device for one in decode(both)] == ["U0", "U1"]


def test_decode_leaves_fields_of_newer_kubelets_alone() -> None:
    unknown = b"\xfa\x01\x03new"  # field 31
    assert decode(HELD + unknown) == ASSIGNED


async def test_what_the_kubelet_offers(socket: Path) -> None:
    with pytest.raises(UnavailableError, match="is missing"):
        await offered(socket)
    lister = PodResources(HELD)
    server = UnixServer([lister], socket)
    await server.listen()
    try:
        with pytest.raises(UnavailableError, match="UNIMPLEMENTED"):
            await offered(socket)
        lister.more = field(1, field(1, NPU) + field(2, "U0") + field(2, "U1"))
        assert await offered(socket) == {NPU: {"U0", "U1"}}
        lister.more = b"\x0a\x7fx"
        with pytest.raises(UnavailableError, match="the field at byte 0"):
            await offered(socket)
    finally:
        await server.shutdown()


class Seen(Pods):
    """Counts how often the kubelet's notes are read."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"), Path("/nowhere"))
        self.reads = 0
        self.asked: list[frozenset[str]] = []

    async def noted(self) -> Mapping[DeviceName, frozenset[str]]:
        self.reads += 1
        return {DeviceName("beta.furiosa.ai/npu", "U0"): frozenset({f"pod-{self.reads}"})}

    async def living(self, uids: Collection[str]) -> frozenset[str]:
        self.asked.append(frozenset(uids))
        return frozenset({"old"})


async def test_an_answer_comes_with_what_is_known_of_the_pods(socket: Path) -> None:
    lister = PodResources(HELD)
    server = UnixServer([lister], socket)
    await server.listen()
    pods = Seen()
    pod_resources = assignments.PodResources(socket, Feed(3600.0), pods)
    pod_resources.suspects = lambda now: {"old"}.union(*now.pods.values())
    running = asyncio.create_task(pod_resources.run())

    async def told() -> Holdings:
        seen = pod_resources.holdings.value.asked_at
        pod_resources.ask()
        return await first(pod_resources.holdings, lambda now: now.asked_at > seen)

    try:
        # It is read twice after a change, as the kubelet may write it only after it lists a device.
        for reads in (1, 2, 2, 2):
            answer = await told()
            assert pods.reads == reads
            assert pods.asked[-1] == {"old", f"pod-{reads}"}
            assert answer.living == {"old"}
        before = answer
        lister.reply = GRPCError(Status.UNAVAILABLE)
        answer = await told()
        assert (answer.pods, answer.living) == (before.pods, before.living)
        lister.reply = b""
        await told()
        assert pods.reads == 3
        await told()
        pod_resources.ask_soon()  # a container of which the kubelet says nothing
        await told()
        assert pods.reads == 5
    finally:
        running.cancel()
        await server.shutdown()


async def test_what_the_kubelet_noted_for_an_agent_before_is_read(socket: Path) -> None:
    """It may list nobody."""
    server = UnixServer([PodResources(b"")], socket)
    await server.listen()
    pods = Seen()
    pod_resources = assignments.PodResources(socket, Feed(3600.0), pods)
    running = asyncio.create_task(pod_resources.run())
    try:
        answer = await first(pod_resources.holdings, lambda now: now.asked_at)
        assert (answer.assignments, pods.reads) == ((), 1)
    finally:
        running.cancel()
        await server.shutdown()
