"""Measures the agent as a kubelet sees it, and prints each figure beside its target.

The agent runs as a process of its own on simulated cards. The kubelet is the stand-in of the
simulator; the calls that are timed come from gRPC's C core in this process, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from npu_agent import __version__, simulator
from npu_agent.devices.families import FAMILIES
from npu_agent.devices.model import Card, CardState, Health, Snapshot, State
from npu_agent.plugin import encode
from npu_agent.plugin.advertise import advertise, resources
from npu_agent.simulator.kubelet import Plugin, StandInKubelet
from npu_agent.wire import v1beta1 as wire

RESOURCE = "beta.furiosa.ai/npu"
DEADLINE = 60.0
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Agent:
    """A running agent and its kubelet."""

    process: subprocess.Popen[bytes]
    kubelet: StandInKubelet
    root: Path
    plugins: Path
    start: float
    """Seconds from the start of the process until the kubelet had its list."""

    async def told(self, after: str = "") -> Plugin:
        """What the kubelet knows, once it has a list from another socket than `after`."""
        return await self.kubelet.until(
            RESOURCE, lambda p: p.messages > 0 and p.endpoint != after, DEADLINE
        )

    def memory(self) -> float:
        """Resident, in MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * PAGE / (1 << 20)

    def cpu(self) -> float:
        """Seconds of CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def stop(self) -> float:
        """Seconds from SIGTERM to the exit."""
        began = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(DEADLINE)
        return time.perf_counter() - began


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """`npu-agent` as a process of its own."""
    command = [sys.executable, "-m", "npu_agent", *arguments]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@asynccontextmanager
async def running(cards: str, *options: str) -> AsyncIterator[Agent]:
    """The agent on these simulated cards, registered."""
    with tempfile.TemporaryDirectory(prefix="npu-bench-") as temporary:
        root, plugins = Path(temporary, "host"), Path(temporary, "plugins")
        await asyncio.to_thread(plugins.mkdir)
        simulator.make(root, simulator.parse_cards(cards))
        kubelet = StandInKubelet(plugins, Path(temporary, "pod-resources"))
        await kubelet.start()
        where = ("--host-root", str(root), "--plugin-dir", str(plugins))
        began = time.perf_counter()
        process = start("run", *where, *options)
        try:
            agent = Agent(process, kubelet, root, plugins, 0.0)
            await agent.told()
            agent.start = time.perf_counter() - began
            yield agent
        finally:
            process.kill()
            process.wait()
            await kubelet.stop()


def calls(socket: Path, method: str, request: bytes, count: int = 1000) -> str:
    """Times calls to the agent: ``p50 / p99`` in ms."""
    channel: Any = grpc.insecure_channel(f"unix:{socket}")
    call = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
    taken = []
    for _ in range(count + 50):  # the first ones warm up
        began = time.perf_counter()
        call(request, timeout=DEADLINE)
        taken.append(1000 * (time.perf_counter() - began))
    channel.close()
    cuts = statistics.quantiles(taken[50:], n=100)
    return f"{cuts[49]:.2f} / {cuts[98]:.2f} ms"


def allocation(ids: list[str]) -> bytes:
    """A request for these devices."""
    container = wire.ContainerAllocateRequest(devices_ids=ids)
    return bytes(wire.AllocateRequest(container_requests=[container]))


def preference(ids: list[str]) -> bytes:
    """A request for half of these devices."""
    container = wire.ContainerPreferredAllocationRequest(
        available_device_i_ds=ids, allocation_size=len(ids) // 2
    )
    return bytes(wire.PreferredAllocationRequest(container_requests=[container]))


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    target: str
    """From spec section 10."""
    peers: str
    """Best to worst of plugins that users run today, measured elsewhere (docs/benchmarks.md)."""
    measured: str


async def in_memory(idle: float) -> AsyncIterator[Figure]:
    """What it holds, and what it does while nothing happens."""
    async with running("warboy=8") as agent:
        yield Figure("process start to registered", "<= 1 s", "", f"{agent.start:.2f} s")
        before, cpu = await agent.told(), agent.cpu()
        await asyncio.sleep(idle)
        cpu = 100 * (agent.cpu() - cpu) / idle
        yield Figure(f"CPU while idle, over {idle:g} s", "<= 0.5 %", "", f"{cpu:.2f} %")
        memory = f"{agent.memory():.1f} MiB"
        yield Figure("resident memory, idle", "<= 50 MiB", "81 MiB (three processes)", memory)
        sent = (await agent.told()).messages - before.messages
        yield Figure("ListAndWatch messages while idle", "0", "0 to 4", str(sent))
        yield Figure("SIGTERM to exit, kubelet connected", "<= 1 s", "", f"{agent.stop():.2f} s")


async def recoveries() -> AsyncIterator[Figure]:
    """How long each loss of the kubelet, and of a card, lasts."""
    async with running("warboy=8") as agent:
        kubelet, known = agent.kubelet, await agent.told()

        began = time.perf_counter()
        await asyncio.to_thread(simulator.apply_fault, agent.root, "npu0", "dead")
        await kubelet.until(RESOURCE, lambda p: len(p.healthy()) == 7, DEADLINE)
        taken = f"{time.perf_counter() - began:.2f} s"
        yield Figure("dead card to kubelet told", "<= 1.5 s", "0 to 5 s", taken)
        began = time.perf_counter()
        await asyncio.to_thread(simulator.apply_fault, agent.root, "npu0", "ok")
        await kubelet.until(RESOURCE, lambda p: len(p.healthy()) == 8, DEADLINE)
        taken = f"{time.perf_counter() - began:.2f} s"
        yield Figure("mended card to kubelet told", "", "never", taken)

        async def lose(what: str, target: str, peers: str, loss: Awaitable[None]) -> Figure:
            nonlocal known
            await loss
            began = time.perf_counter()
            known = await agent.told(after=known.endpoint)
            taken = f"{time.perf_counter() - began:.2f} s"
            return Figure(what, target, peers, taken)

        async def restart(away: float) -> None:
            await kubelet.stop()
            await asyncio.sleep(away)
            await kubelet.start()

        async def cancel() -> None:
            kubelet.hang_up(RESOURCE)

        async def remove() -> None:
            await asyncio.to_thread((agent.plugins / known.endpoint).unlink)

        yield await lose(
            "kubelet away 1 s: its return to registered", "<= 2 s", "6 s, or never", restart(1)
        )
        await asyncio.sleep(6)  # a loss soon after another is met with more patience
        yield await lose("kubelet away 30 s, likewise", "<= 2 s", "", restart(30))
        await asyncio.sleep(6)
        yield await lose("stream cancelled by the kubelet", "<= 2 s", "never", cancel())
        await asyncio.sleep(6)
        yield await lose("our socket removed", "<= 2 s", "", remove())

        kept = (await agent.told()).messages
        await kubelet.renew_socket()
        await asyncio.sleep(3)
        after = await agent.told()
        nothing = after.endpoint == known.endpoint and after.messages == kept
        said = "nothing happens" if nothing else "registered anew"
        yield Figure("kubelet.sock made anew, stream open", "nothing", "one exits", said)


async def answers() -> AsyncIterator[Figure]:
    """How quick the calls are in which a Pod's start waits."""
    floor = "0.2 ms"
    for cards, options, listed in (
        ("warboy=8", (), 8),
        ("rngd=8", ("--default-pe", "Single"), 64),
    ):
        async with running(cards, *options) as agent:
            plugin = await agent.told()
            ids, socket = list(plugin.healthy()), agent.plugins / plugin.endpoint
            for what, target, peers, method, request in (
                ("the empty call, the floor", "", floor, "GetDevicePluginOptions", b""),
                (
                    "Allocate 1",
                    "p99 <= 2 ms",
                    "0.17-0.23 (0.8) ms",
                    "Allocate",
                    allocation(ids[:1]),
                ),
                (
                    "Allocate 8",
                    "p99 <= 2 ms",
                    "0.17-0.43 (1.7) ms",
                    "Allocate",
                    allocation(ids[:8]),
                ),
            ):
                taken = await asyncio.to_thread(calls, socket, method, request)
                yield Figure(f"{what}, {listed} listed, p50 / p99", target, peers, taken)
    for cards, many, target, peers in (
        ("warboy=8", 16, "5 ms", "101 ms"),
        ("rngd=8", 64, "20 ms", "4 of 64: 2.5 s"),
    ):
        async with running(cards, "--default-pe", "Single") as agent:
            plugin = await agent.told()
            request = preference(list(plugin.healthy()))
            socket = agent.plugins / plugin.endpoint
            taken = await asyncio.to_thread(calls, socket, "GetPreferredAllocation", request, 200)
            what = f"GetPreferredAllocation, {many // 2} of {many}, p50 / p99"
            yield Figure(what, f"<= {target}", peers, taken)


async def crowded() -> AsyncIterator[Figure]:
    """One change among 1,000 devices: what the loop does between a look and the message."""
    cards = tuple(
        CardState(
            id=f"{index:032}",
            card=Card(
                family="rngd",
                index=index,
                product="rngd",
                nodes=frozenset(FAMILIES["rngd"].nodes(index)),
            ),
            health=Health(state=State.HEALTHY, reason="works", since=0.0),
        )
        for index in range(125)
    )
    (resource,) = resources(RESOURCE, 1)
    encode.device_list(advertise(Snapshot(cards=cards, complete=True), resource))
    taken = []
    for turn in range(100):
        sick = replace(cards[turn].health, state=State.UNHEALTHY)
        changed = (*cards[:turn], replace(cards[turn], health=sick), *cards[turn + 1 :])
        began = time.perf_counter()
        encode.device_list(advertise(Snapshot(cards=changed, complete=True), resource))
        taken.append(1000 * (time.perf_counter() - began))
    figure = f"{statistics.median(taken):.1f} ms"
    yield Figure("one card among 1,000 devices changes: the new list", "", "", figure)


async def main() -> None:
    """Prints the figures as they come, as a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--idle", type=float, default=20.0, metavar="SECONDS", help="default: 20")
    idle = parser.parse_args().idle
    load = os.getloadavg()[0]
    print(
        f"npu-agent {__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, "
        f"8 simulated cards; load at the start {load:.1f}\n"
    )
    print(f"| {'figure':52} | {'target':12} | {'peers today':24} | {'measured':16} |")
    print(f"|{'-' * 54}|{'-' * 14}|{'-' * 26}|{'-' * 18}|")
    for part in (in_memory(idle), recoveries(), answers(), crowded()):
        async for one in part:
            print(
                f"| {one.what:52} | {one.target:12} | {one.peers:24} | {one.measured:16} |",
                flush=True,
            )


asyncio.run(main())
