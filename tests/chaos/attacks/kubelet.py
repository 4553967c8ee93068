"""Attacks by the kubelet, and by whoever else reaches the sockets in its directories."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import h2.config
import h2.connection
from grpclib.exceptions import GRPCError

from bench.process import RESOURCE
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.kubelet.wire import v1beta1 as wire
from tests.chaos.table import attack
from tests.chaos.world import World, become, remove
from tests.e2e.journey.second import SecondPlugin


@attack(short=True)
async def kubelet_is_restarted(here: World) -> None:
    """The kubelet is restarted five times.

    Registered again each time.
    """
    for _ in range(5):
        await here.restart_kubelet()


@attack()
async def kubelets_socket_is_renewed(here: World) -> None:
    """`kubelet.sock` is made again by a kubelet that goes on.

    It keeps its registration, and registers again when that kubelet is restarted.
    """
    with here.stays_registered():
        await here.kubelet.renew_socket()
        await asyncio.sleep(5)
        await here.pod()
    await here.restart_kubelet()


@attack()
async def stream_ends(here: World) -> None:
    """The kubelet ends its stream 20 times, and never opens one again by itself.

    Registered again each time.
    """
    for _ in range(20):
        async with here.registers():
            here.kubelet.hang_up(RESOURCE)


@attack(short=True)
async def registration_goes_wrong(here: World) -> None:
    """Register is refused, never answered, or answered and the stream never opened.

    It tries again each time, and is registered when that is over.
    """
    kubelet = here.kubelet

    async def goes_wrong(what: str, bad: object) -> None:
        good, calls = getattr(kubelet, what), kubelet.calls
        setattr(kubelet, what, bad)
        kubelet.hang_up(RESOURCE)
        await here.until(lambda: kubelet.calls > calls + 1, "a second call")
        setattr(kubelet, what, good)
        await here.well()

    await goes_wrong("refusal", "not now \x1b[2J")
    await goes_wrong("answers", bad=False)
    await goes_wrong("asks", bad=False)


@attack()
async def another_plugin_takes_the_resource(here: World) -> None:
    """Another plugin registers the resource, of which the kubelet informs neither.

    Registered again, and Pods get NPUs.
    """
    server = UnixServer([SecondPlugin(["not-ours"])], here.plugins / "impostor.sock")
    await server.listen()
    try:
        await here.kubelet.register(
            wire.RegisterRequest(
                version="v1beta1", endpoint="impostor.sock", resource_name=RESOURCE
            )
        )
        async with here.registers():
            pass
    finally:
        await server.shutdown()
    # Where the impostor's stream ends, the kubelet drops whoever has the resource by now.
    await here.well()


@contextlib.asynccontextmanager
async def in_place_of(path: Path, *, accepts: bool, says: bytes = b"") -> AsyncIterator[None]:
    """Another socket: it says something and closes what it accepts, or accepts nothing."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.setblocking(False)

        async def close_all() -> None:
            loop = asyncio.get_running_loop()
            while True:
                connection, _ = await loop.sock_accept(listener)
                with connection, contextlib.suppress(OSError):
                    await loop.sock_sendall(connection, says)

        closing = asyncio.create_task(close_all()) if accepts else None
        try:
            yield
        finally:
            if closing:
                closing.cancel()
                await asyncio.gather(closing, return_exceptions=True)
    path.unlink(missing_ok=True)


@attack(short=True)
async def kubelets_socket_is_something_else(here: World) -> None:
    """`kubelet.sock` is a file, a folder, a pipe, a link to itself, to nothing; closes; is noise.

    Registered with the next kubelet.
    """
    await here.kubelet.stop()
    path = here.plugins / "kubelet.sock"
    for what in ("empty", "folder", "pipe", "loop", "/nowhere"):
        become(path, what)
        await asyncio.sleep(2)
    remove(path)
    for says in (b"", random.Random(1).randbytes(4000)):
        async with in_place_of(path, accepts=True, says=says):
            await asyncio.sleep(5)
    await here.kubelet.start()
    await here.well()


@attack()
async def pod_resources_is_noise(here: World) -> None:
    """pod-resources is a socket that closes, one that answers noise, and one that never answers.

    Pods get NPUs meanwhile.
    """
    path = here.plugins.parent / "pod-resources" / "kubelet.sock"
    assert here.kubelet.lister
    await here.kubelet.lister.shutdown()
    for accepts, says in ((True, b""), (True, random.Random(1).randbytes(4000)), (False, b"")):
        async with in_place_of(path, accepts=accepts, says=says):
            await asyncio.sleep(3)
            await here.pod()
    await here.restart_kubelet()


def endpoint(here: World) -> Path:
    """The agent's socket."""
    return here.plugins / here.kubelet.plugins.value[RESOURCE].endpoint


@attack(short=True)
async def streams_are_reset(here: World) -> None:
    """8,000 streams are opened and reset on the agent's socket.

    At most 32 MiB more memory, and the kubelet keeps its stream.
    """
    with here.grows_by(32), here.stays_registered():
        await asyncio.to_thread(open_and_reset, endpoint(here), 8000)
        await here.pod()


def open_and_reset(path: Path, times: int) -> None:
    headers = [
        (":method", "POST"), (":scheme", "http"), (":authority", "localhost"),
        (":path", "/v1beta1.DevicePlugin/Allocate"), ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]  # fmt: skip
    for _ in range(times // 100):
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(path))
            client.initiate_connection()
            for number in range(100):
                client.send_headers(2 * number + 1, headers)
                client.reset_stream(2 * number + 1)
            connection.sendall(client.data_to_send())


@attack(short=True)
async def noise_on_the_agents_socket(here: World) -> None:
    """300 connections to the agent's socket: noise, HTTP/1, and noise after HTTP/2's greeting.

    The kubelet keeps its stream.
    """
    chance, path = random.Random(1), endpoint(here)

    def send() -> None:
        for number in range(300):
            noise = chance.randbytes(chance.randrange(1, 5000))
            greeting = (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(path))
                connection.sendall(greeting[number % 3] + noise)

    with here.stays_registered():
        await asyncio.to_thread(send)
        await here.pod()


@attack(short=True)
async def allocations_of_nonsense(here: World) -> None:
    """Allocate is asked for nothing, for what is not there, for 10,000 devices, for one twice.

    Refused, the message short and without control characters; nothing is handed out.
    """
    (first, *_) = here.kubelet.plugins.value[RESOURCE].healthy()
    for ids in (
        ["nothing"], ["../../etc/passwd"], ["\x1b[2J\n\x00"], ["x" * 1_000_000],
        [f"device-{number}" for number in range(10_000)], [first, "nothing"], [""],
    ):  # fmt: skip
        try:
            grant = await here.kubelet.allocate_ids(RESOURCE, ids)
        except GRPCError as error:
            message = str(error.message)
            assert len(message) < 10_000, f"{len(message)} characters"
            assert message.isprintable(), message[:100]
        else:
            raise AssertionError(f"handed out for {str(ids)[:100]}: {grant}")


@attack()
async def connections_are_held_at_the_agents_socket(here: World) -> None:
    """600 connections to the agent's socket say nothing, and stay.

    The kubelet is served meanwhile, and registers the agent again after a restart.
    """
    path = endpoint(here)
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(1)
            with contextlib.suppress(OSError):
                one.connect(str(path))
        await here.pod()
        async with here.registers():
            here.kubelet.hang_up(RESOURCE)
