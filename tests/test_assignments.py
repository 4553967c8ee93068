"""Who holds what, asked of a pod-resources server that behaves and of some that do not."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from npu_agent import assignments
from npu_agent.assignments import Assignment, UnavailableError, decode, fetch, socket_beside
from npu_agent.rpc import UnixServer
from npu_agent.wire import v1 as wire
from tests.plugin.helpers import short_directory

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


class PodResources:
    """A kubelet's pod-resources API that answers `reply`, refuses, or never answers (None)."""

    def __init__(self, reply: bytes | GRPCError | None) -> None:
        self.reply = reply

    def __mapping__(self) -> dict[str, Handler]:
        raw = assignments._Raw
        return {
            "/v1.PodResourcesLister/List": Handler(self._list, Cardinality.UNARY_UNARY, raw, raw)
        }

    async def _list(self, stream: Stream[bytes, bytes]) -> None:
        await stream.recv_message()
        if self.reply is None:
            await asyncio.Event().wait()
        if isinstance(self.reply, GRPCError):
            raise self.reply
        await stream.send_message(assignments._Raw(self.reply or b""))


@pytest.fixture
async def socket() -> AsyncIterator[Path]:
    with short_directory() as directory:
        yield directory / "kubelet.sock"


async def ask(socket: Path, reply: bytes | GRPCError | None) -> tuple[Assignment, ...]:
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


def test_decode_leaves_fields_of_newer_kubelets_alone() -> None:
    unknown = b"\xfa\x01\x03new"  # field 31
    assert decode(HELD + unknown) == ASSIGNED
