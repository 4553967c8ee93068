"""Everything that happens to an agent, again and again: does anything grow?"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

from grpclib.exceptions import GRPCError

from bench.figure import Figure
from bench.process import RESOURCE, Agent, running
from bench.scraper import PROMETHEUS, TEXT, scrape
from npu_agent import simulator
from npu_agent.simulator.kubelet import NotEnoughError

FAULTS = ("dead", "hot", "errors", "hang", "garbage", "unreadable", "no-node", "gone", "swap")
WARM = 60.0
"""Seconds until everything has happened, and memory is what it will be."""


async def soak(minutes: float) -> AsyncIterator[Figure]:
    """What the agent holds at the start, when it is warm, and at the end."""
    async with running("warboy=4,rngd=4", alive=True) as agent:
        await agent.settled()
        for page in ("/metrics", "/", "/status.json"):
            await asyncio.to_thread(scrape, agent.port, page, PROMETHEUS, 1, 10)
        yield Figure("at the start", _held(agent))
        done: Counter[str] = Counter()
        chance = random.Random(1)
        work = [
            asyncio.create_task(_again(done, name, pause, act))
            for name, pause, act in (
                ("scrapes", 0.5, lambda: _scrape(agent, chance)),
                ("Pods", 1.0, lambda: _pod(agent, chance)),
                ("faults", 4.0, lambda: _fault(agent, chance)),
                ("config edits", 5.0, lambda: _edit(agent, chance)),
                ("kubelet restarts", 20.0, lambda: _restart(agent)),
            )
        ]
        try:
            until = time.monotonic() + 60 * minutes
            await asyncio.sleep(min(WARM, 30 * minutes))
            yield Figure("when everything has happened", _held(agent))
            while (left := until - time.monotonic()) > 0:
                await asyncio.wait(work, timeout=min(left, 60), return_when="FIRST_COMPLETED")
                if any(task.done() for task in work) or agent.popen.poll() is not None:
                    break
                yield Figure(f"{left / 60:.0f} minutes before the end", _held(agent))
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        await _calm(agent)
        yield Figure("at the end", _held(agent))
        for what, count in done.items():
            yield Figure(what, f"{count}")
        yield Figure("writes to the API server", f"{agent.node.writes}")
        yield Figure("SIGTERM to exit", f"{agent.stop():.2f} s")


def _held(agent: Agent) -> str:
    memory, files, threads = agent.memory() / 1024, agent.files(), agent.threads()
    return f"{memory:.1f} MiB, {files} files, {threads} threads"


async def _again(
    done: Counter[str], name: str, pause: float, act: Callable[[], Awaitable[None]]
) -> None:
    while True:
        await asyncio.sleep(pause)
        await act()
        done[name] += 1


async def _calm(agent: Agent) -> None:
    """All is well again, wherever the work has left it."""
    await asyncio.to_thread(agent.config.write_text, _kept(agent))
    for number in range(8):
        await asyncio.to_thread(simulator.apply_fault, agent.root, f"npu{number}", "back")
    await agent.kubelet.stop()
    await agent.kubelet.start()
    await agent.until_healthy(8)
    await asyncio.sleep(10)


def _kept(agent: Agent) -> str:
    """The config that every edit keeps."""
    lines = agent.config.read_text().splitlines()
    return "\n".join((*(line for line in lines if line.startswith(("pluginDir", "metrics"))), ""))


async def _scrape(agent: Agent, chance: random.Random) -> None:
    page = chance.choice(("/metrics", "/metrics", "/metrics", "/", "/status.json", "/readyz"))
    headers = chance.choice((TEXT, PROMETHEUS))
    with contextlib.suppress(ConnectionError):  # /readyz says 503 while the kubelet is away
        await asyncio.to_thread(scrape, agent.port, page, headers, chance.choice((1, 4)), 2)


async def _pod(agent: Agent, chance: random.Random) -> None:
    # Refused where a card has just died, or the kubelet is away.
    with contextlib.suppress(NotEnoughError, GRPCError, OSError, KeyError, TimeoutError):
        grant = await agent.kubelet.allocate(RESOURCE, chance.choice((1, 2)))
        try:
            await asyncio.sleep(1)
        finally:  # a core that stays held keeps devices of another shape from being offered
            agent.kubelet.release(RESOURCE, grant.ids)


async def _fault(agent: Agent, chance: random.Random) -> None:
    card, fault = f"npu{chance.randrange(8)}", chance.choice(FAULTS)
    await asyncio.to_thread(simulator.apply_fault, agent.root, card, fault)
    await asyncio.sleep(3)
    await asyncio.to_thread(simulator.apply_fault, agent.root, card, "back")


async def _edit(agent: Agent, chance: random.Random) -> None:
    more = chance.choice(
        (
            "defaultPe: Single",
            "defaultPe: Fusion",
            "disabledDevices: [{devName: npu1}]",
            "labels: {sets: [alpha, beta, current]}",
            "health: {interval: 0.2}",
            "defaultPe: Sinlge",
            "",
        )
    )
    await asyncio.to_thread(agent.config.write_text, f"{_kept(agent)}{more}\n")


async def _restart(agent: Agent) -> None:
    await agent.kubelet.stop()
    await asyncio.sleep(1)
    await agent.kubelet.start()
