"""New connections without end to the public port, and what the kubelet notices of that.

`python -m bench.flood`: how many probes are answered, and how long Allocate takes, in peace and
with 5,000 connections a second from one address of the loopback interface. The flood costs CPU
time itself: so there is one of a port that is nobody's too, which the kernel refuses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import grpc

from bench.figure import HEADER, Figure
from bench.plugin import allocation
from bench.process import DEADLINE, Agent, free_port, program, running

_KUBELET = "127.0.0.9"
"""The address that probes come from: not that of the flood."""
_TIMEOUT = 5.0
"""Seconds, as the probes in k8s/ have it."""
_MOST = 120.0
"""Seconds that a flood may last, whatever was asked for."""
NOBODY = "of nobody's port"
KINDS = ("close", "silent", "ask")
"""What the client does: close the connection soon, leave it open and silent, ask for the page."""


async def flood(rate: int, seconds: float) -> AsyncIterator[Figure]:
    """In peace, then with each kind of flood."""
    async with running("warboy=8") as agent:
        await agent.settled()
        async for one in _noticed(agent, "in peace", seconds):
            yield one
        for kind in (NOBODY, *KINDS):
            port = free_port() if kind is NOBODY else agent.port
            command = (sys.executable, "-m", "bench.flood", "--against", str(port))
            kinds = () if kind is NOBODY else ("--kind", kind)
            more = (*kinds, "--rate", str(rate), "--seconds", str(seconds + 5))
            with program(*command, *more):
                await asyncio.sleep(2)
                before = agent.spent()
                async for one in _noticed(agent, f"{rate:,}/s, {kind}", seconds):
                    yield one
                cpu = 100 * (agent.spent() - before).cpu / seconds
                yield Figure(f"CPU of the agent, {rate:,}/s, {kind}", f"{cpu:.0f} %")


async def _noticed(agent: Agent, how: str, seconds: float) -> AsyncIterator[Figure]:
    plugin = await agent.told()
    ids, path = list(plugin.healthy()), agent.plugins / plugin.endpoint
    end = time.monotonic() + seconds
    allocate = asyncio.to_thread(_allocate, str(path), allocation(ids[:1]), end)
    probes = asyncio.to_thread(_probe, agent.probes, end)
    taken, (answered, asked, longest) = await asyncio.gather(allocate, probes)
    yield Figure(
        f"probes answered, {how}",
        f"{answered} of {asked}, {1000 * longest:.0f} ms at most",
        "all",
    )
    taken.sort()
    p50, p99 = (1000 * taken[int(len(taken) * part)] for part in (0.5, 0.99))
    yield Figure(f"Allocate, {how}: p50 / p99", f"{p50:.1f} / {p99:.1f} ms", "p99 <= 25 ms")


def _allocate(path: str, request: bytes, end: float) -> list[float]:
    channel = grpc.insecure_channel(f"unix:{path}")
    call = channel.unary_unary("/v1beta1.DevicePlugin/Allocate")
    taken = []
    while (began := time.monotonic()) < end:
        call(request, timeout=DEADLINE)
        taken.append(time.monotonic() - began)
        time.sleep(0.02)
    channel.close()
    return taken


def _probe(port: int, end: float) -> tuple[int, int, float]:
    """Probes on a new connection each: how many were answered, of how many, and the longest."""
    answered = asked = 0
    longest = 0.0
    while (began := time.monotonic()) < end:
        asked += 1
        with contextlib.suppress(OSError):
            answered += _answers(port)
            longest = max(longest, time.monotonic() - began)
        time.sleep(max(0.0, began + 0.5 - time.monotonic()))
    return answered, asked, longest


def _answers(port: int) -> bool:
    at = ("127.0.0.1", port)
    with socket.create_connection(at, _TIMEOUT, source_address=(_KUBELET, 0)) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return connection.recv(100).startswith(b"HTTP/1.1 200")


def attack(port: int, kind: str, rate: int, seconds: float) -> Counter[str]:
    """Opens so many connections a second, in steps of 10 ms, and closes them a second later."""
    opened: list[tuple[float, socket.socket]] = []
    found: Counter[str] = Counter()
    began = now = time.monotonic()
    made = 0
    while now - began < seconds:
        while made < rate * (now - began) and len(opened) < 10_000:
            made += 1
            one = socket.socket()
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                try:
                    one.connect(("127.0.0.1", port))
                except OSError:
                    found["failed"] += 1
                    one.close()
                    continue
            opened.append((now + (0.05 if kind == "close" else 1.0), one))
        if kind == "ask":
            for _, one in opened[-rate // 50 :]:
                with contextlib.suppress(OSError):
                    one.send(b"GET / HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n")
        while opened and opened[0][0] < now:
            opened.pop(0)[1].close()
        time.sleep(0.01)
        now = time.monotonic()
    found["opened"] = made
    return found


async def main(words: Sequence[str]) -> None:
    """Prints the figures as they come, as a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench.flood", description=__doc__)
    parser.add_argument("--rate", type=int, default=5000, help="connections a second; 5000")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each flood; 15")
    parser.add_argument("--against", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, default="close", help=argparse.SUPPRESS)
    wanted = parser.parse_args(words)
    seconds = min(wanted.seconds, _MOST)
    if wanted.against is not None:
        print(attack(wanted.against, wanted.kind, wanted.rate, seconds))
        return
    print(HEADER)
    async for one in flood(wanted.rate, seconds):
        print(one, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
