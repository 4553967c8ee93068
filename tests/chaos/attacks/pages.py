"""Attacks by whoever reaches the agent's ports."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

from tests.chaos.table import attack
from tests.chaos.world import World


def exchange(port: int, request: bytes, most: int = 65536) -> bytes:
    """Sends something, and returns the beginning of what comes back."""
    received = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
    ):
        connection.sendall(request)
        while len(received) < most and (part := connection.recv(65536)):
            received += part
    return received


@attack(short=True)
async def requests_that_are_none(here: World) -> None:
    """500 requests that are none: noise, endless headers and paths, wrong lengths, TLS.

    Pages and probes are answered afterwards.
    """
    chance = random.Random(1)
    requests = (
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: " + b"text/plain;q=," * 3000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nFFFFFFFF\r\n",
    )

    def send() -> None:
        for number in range(500):
            request = requests[number % 8] if number % 8 < 7 else chance.randbytes(200)
            for port in (here.agent.port, here.agent.probes):
                exchange(port, request, 0)

    await asyncio.to_thread(send)


@attack(short=True)
async def paths_and_methods(here: World) -> None:
    """Paths that leave the folder, hostile queries, methods that write, on both ports.

    Only GET and HEAD are answered; no answer is a 500, or has a file's content.
    """
    paths = (
        "/../../../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/runbook/../..",
        "/%00", "/static/%2e%2e%2fetc%2fpasswd", "/?" + "a=b&" * 1000, "/metrics?name[]=%ff",
        "/status.json/..", "/metrics\\..", "/%", "*", "http://elsewhere/", "/debug/pprof",
    )  # fmt: skip
    methods = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "OPTIONS", "X")
    for port in (here.agent.port, here.agent.probes):
        for method in methods:
            for path in paths:
                request = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
                answer = await asyncio.to_thread(exchange, port, request.encode())
                first = answer.partition(b"\r\n")[0]
                assert b"root:" not in answer, path
                assert b" 50" not in first, f"{method} {path}: {first!r}"
                if method not in ("GET", "HEAD"):
                    assert b" 20" not in first, f"{method} {path}: {first!r}"


@attack(short=True)
async def readers_that_read_nothing(here: World) -> None:
    """200 clients ask for /metrics 50 times each, and read nothing.

    At most 48 MiB more memory; probes are answered.
    """
    with here.grows_by(48), contextlib.ExitStack() as stack:
        for _ in range(200):
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                one.settimeout(1)
                one.connect(("127.0.0.1", here.agent.port))
                one.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 50)
        await asyncio.sleep(2)
        assert await here.alive()


@attack()
async def senders_that_take_their_time(here: World) -> None:
    """300 connections send a byte of a header each second, for ten seconds.

    Probes are answered meanwhile; pages are served when they are gone.
    """
    with contextlib.ExitStack() as stack:
        senders = []
        for _ in range(300):
            one = stack.enter_context(socket.socket())
            one.settimeout(1)
            with contextlib.suppress(OSError):
                one.connect(("127.0.0.1", here.agent.port))
                senders.append(one)
        for byte in b"GET / HTTP":
            for one in senders:
                with contextlib.suppress(OSError):
                    one.send(bytes([byte]))
            assert await here.alive()
            await asyncio.sleep(1)


@attack(short=True)
async def requests_in_one_go(here: World) -> None:
    """10,000 requests on one connection, sent before the first answer is read.

    Probes are answered meanwhile; at most 32 MiB more memory.
    """
    requests = b"GET /status.json HTTP/1.1\r\nHost: a\r\n\r\n" * 10_000
    with here.grows_by(32):
        exchanging = asyncio.to_thread(exchange, here.agent.port, requests, 1 << 20)
        flood = asyncio.create_task(exchanging)
        while not flood.done():
            assert await here.alive()
            await asyncio.sleep(0.2)
        await flood


FLOOD = """
import socket, sys, time
held, end = [], time.monotonic() + 10
while time.monotonic() < end:
    try:
        held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=1))
    except OSError:
        pass
    if len(held) > 900:
        held.pop(0).close()
"""


@contextlib.contextmanager
def flooded(port: int, by: int) -> Iterator[Callable[[], bool]]:
    """Floods a port by so many processes; yields what says whether they still do."""
    command = [sys.executable, "-c", FLOOD, str(port)]
    floods = [subprocess.Popen(command) for _ in range(by)]
    try:
        yield lambda: any(flood.poll() is None for flood in floods)
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()


@attack(alone=True)
async def connections_without_end(here: World) -> None:
    """Connections are opened as fast as possible for ten seconds and held, 900 by each process.

    Two processes do it to the port of the pages: every liveness probe, each on a connection of its
    own and with five seconds, is answered. One does it to the port of the probes. Pods get NPUs.
    """
    for port, by in ((here.agent.port, 2), (here.agent.probes, 1)):
        with flooded(port, by) as going_on:
            while going_on():
                assert port == here.agent.probes or await here.alive()
                await here.pod()
                await asyncio.sleep(0.5)
