"""Measures what it costs the event loop to ask the kubelet who holds what.

``python -m bench.podresources`` prints the table. A kubelet's stand-in answers from a process of
its own.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from grpclib.const import Cardinality, Handler
from grpclib.server import Stream

from bench.figure import HEADER, Figure
from npu_agent.core.ledger import Ledger
from npu_agent.feed import Feed
from npu_agent.kubelet import podresources as assignments
from npu_agent.kubelet.pods import Pods
from npu_agent.kubelet.rpc import Encoded, UnixServer, received
from npu_agent.kubelet.wire import v1 as wire

MIB = 1 << 20
TURNS = 5


def field(number: int, content: bytes) -> bytes:
    length, rest = bytearray(), len(content)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((number << 3 | 2, *length, rest)) + content


def device(index: int) -> bytes:
    """As a kubelet writes it: each ID with its resource and its NUMA node, and in no order."""
    id_ = f"{random.Random(index).getrandbits(128):032X}_cores_0-3"
    node = field(3, field(1, b"\x08\x01"))
    return field(2, field(1, b"beta.furiosa.ai/npu") + field(2, id_.encode()) + node)


def pod(index: int, devices: int, more: bytes = b"") -> bytes:
    """A Pod of one container, which has 16 CPUs of its own."""
    held = b"".join(device(index * devices + one) for one in range(devices))
    container = field(1, b"main") + held + field(3, bytes(range(16))) + more
    name = f"train-{index:06}-{index * 7919 % 100_000:05}".encode()
    return field(1, field(1, name) + field(2, b"team-%d" % (index % 7)) + field(3, container))


def padded(devices: int, size: int) -> bytes:
    """An answer of one Pod, filled up with its memory, which is passed over."""
    memory = field(4, field(1, b"hugepages-2Mi") + b"\x10\x80\x80\x80\x08")
    return pod(0, devices, memory * ((size - len(pod(0, devices)) - 100) // len(memory)))


ANSWERS: dict[str, Callable[[], bytes]] = {
    "250 Pods x 8 devices, 0.2 MiB": lambda: b"".join(pod(index, 8) for index in range(250)),
    "4 MiB, one Pod, 4,000 devices": lambda: padded(4_000, 4 * MIB),
    "4 MiB, one Pod, 32,000 devices": lambda: padded(32_000, 4 * MIB),
    "8 MiB, one Pod, 32,000 devices": lambda: padded(32_000, 8 * MIB),
}


class Lister:
    def __init__(self, answer: bytes) -> None:
        self._answer = Encoded(answer)

    def __mapping__(self) -> dict[str, Handler]:
        one = Cardinality.UNARY_UNARY
        return {assignments._LIST: Handler(self._list, one, wire.ListPodResourcesRequest, Encoded)}

    async def _list(self, stream: Stream[wire.ListPodResourcesRequest, Encoded]) -> None:
        await received(stream)
        await stream.send_message(self._answer)


async def serve(socket: Path, what: str) -> None:
    server = UnixServer([Lister(ANSWERS[what]())], socket)
    await server.listen()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def once(socket: Path) -> None:
    """Asks as the agent does, for the first time: the same answer again is not read again."""
    pods = assignments.PodResources(
        socket, Feed(60.0), Pods(socket.parent, socket.parent), Feed(Ledger())
    )
    asking = asyncio.create_task(pods.run())
    async for holdings in pods.holdings.watch():
        if holdings.asked_at:
            break
    asking.cancel()


async def watched(work: Awaitable[object]) -> tuple[float, float, float]:
    """How long `work` takes, and of the loop meanwhile its longest lag and its longest turn; in ms.

    The lag is how late a task is that wants to run every millisecond; the turn is the CPU time that
    passes before it does, which a busy machine does not stretch.
    """
    lags, turns = [0.0], [0.0]

    async def tick() -> None:
        while True:
            due, cpu = time.perf_counter() + 0.001, time.thread_time()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - due)
            turns.append(time.thread_time() - cpu)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    await work
    taken = time.perf_counter() - began
    await asyncio.sleep(0.01)
    ticker.cancel()
    return 1000 * taken, 1000 * max(lags), 1000 * max(turns)


async def figures() -> AsyncIterator[Figure]:
    """Lines of ``python -m bench``."""
    _, lag, turn = await watched(asyncio.sleep(0.2))
    yield Figure("nothing happens: lag / turn of the loop", f"{lag:.1f} / {turn:.1f} ms")
    for what in ANSWERS:
        with tempfile.TemporaryDirectory(prefix="npu-bench-") as temporary:
            socket = Path(temporary, "kubelet.sock")
            command = (sys.executable, "-m", "bench.podresources", str(socket), what)
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            try:
                assert process.stdout
                await process.stdout.readline()
                asked = [await watched(once(socket)) for _ in range(TURNS)]
            finally:
                process.kill()
                await process.wait()
        taken, lag, turn = (statistics.median(column) for column in zip(*asked, strict=True))
        measured = f"{taken:.0f} / {lag:.1f} / {turn:.1f} ms"
        yield Figure(f"{what}: in all / lag / turn", measured, "turn <= 2 ms")


async def main() -> None:
    """Prints the figures as they come."""
    print(HEADER)
    async for one in figures():
        print(one, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
    else:
        asyncio.run(main())
