"""Everything that happens to an agent, at once, again and again: does anything grow?"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import astuple, dataclass, field

from grpclib.exceptions import GRPCError, StreamTerminatedError

from bench import curve
from bench.figure import Figure
from bench.process import RESOURCE, Agent, running
from bench.scraper import PROMETHEUS, TEXT, scrape
from npu_agent.people import simulator
from npu_agent.people.simulator.kubelet import NotEnoughError
from npu_agent.people.simulator.pluginmanager import PrepareError

FAULTS = ("dead", "hot", "errors", "hang", "garbage", "unreadable", "no-node")
PLUGGED = ("gone", "swap")
EVERY = 10.0
"""Seconds between two samples."""
WARM = 600.0
"""Seconds until everything has happened in every order, and memory is what it will be; of a short
soak half of its time."""
GROWTH = {"memory, MiB": 2.0, "threads": 1.0, "files": 2.0, "tasks": 4.0}
"""How much each may rise from then to the end (`curve.risen`).

What is lost with an event would be lost with each: in ten minutes there are 10 restarts of the
kubelet, 80 faults, and 130 Pods and 140 claims that get a card, so that one file, thread or task
for each of the rarest would be 10. Less than that comes and goes with what is just under way when a
sample is taken. 2 MiB are what the allocator takes for peaks and keeps: one KiB that is lost
with each scrape would be more within half an hour.
"""


@dataclass(frozen=True)
class Held:
    """What the agent holds at one moment."""

    memory: float
    """MiB."""
    threads: int
    files: int
    tasks: int
    objects: int

    def __str__(self) -> str:
        return (
            f"{self.memory:.1f} MiB, {self.files} files, {self.threads} threads, "
            f"{self.tasks} tasks, {self.objects:,} objects"
        )


@dataclass
class _Soak:
    """A soak that is under way."""

    agent: Agent
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    done: Counter[str] = field(default_factory=Counter)
    fixed: str = ""
    """The lines of the config that every edit keeps."""
    api: str = "device-plugin"
    """By which API the cards are offered."""
    more: str = ""
    """The line of the config that an edit has put there."""
    claimed: set[str] = field(default_factory=set)
    """The devices that claims have."""
    samples: list[tuple[float, Held]] = field(default_factory=list)
    """With the seconds since the start."""

    def edited(self) -> None:
        """Writes the config."""
        allocation = f"allocation: {{api: {self.api}}}"
        self.agent.config.write_text(f"{self.fixed}\n{allocation}\n{self.more}\n", encoding="utf-8")


async def soak(minutes: float) -> AsyncIterator[Figure]:
    """What the agent holds meanwhile, as curves, and what was done to it."""
    async with running("warboy=4,rngd=4", alive=True) as agent:
        await agent.settled()
        await agent.manager.start()
        it = _Soak(agent, fixed=agent.config.read_text(encoding="utf-8"))
        for page in ("/metrics", "/", "/status.json"):
            await asyncio.to_thread(scrape, agent.port, page, PROMETHEUS, 1, 10)
        yield Figure("at the start", str(await _held(agent)))
        work = [
            asyncio.create_task(_again(it.done, name, pause, act))
            for name, pause, act in (
                ("scrapes", 0.5, lambda: _scrape(it)),
                ("Pods", 1.0, lambda: _pod(it)),
                ("claims", 1.0, lambda: _claim(it)),
                ("faults and recoveries", 4.0, lambda: _fault(it, FAULTS)),
                ("cards unplugged and plugged", 10.0, lambda: _fault(it, PLUGGED)),
                ("config edits", 5.0, lambda: _edit(it)),
                ("moves between device plugin and DRA", 30.0, lambda: _move(it)),
                # Rarely: for 30 s after each, nothing that is held counts as given back.
                ("kubelet restarts", 60.0, lambda: _restart(it)),
            )
        ]
        began, last = time.monotonic(), 60 * minutes
        try:
            while (now := time.monotonic() - began) < last:
                it.samples.append((now, await _held(agent)))
                if len(it.samples) % 30 == 0:  # each 5 minutes
                    yield Figure(f"after {now / 60:.0f} minutes", str(it.samples[-1][1]))
                await asyncio.wait(work, timeout=EVERY, return_when="FIRST_COMPLETED")
                for task in work:
                    if task.done():
                        task.result()  # raises what has ended it
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        for figure in _curves(it, min(WARM, last / 2)):
            yield figure
        await _calm(it)
        yield Figure("at the end, when all is calm again", str(await _held(agent)))
        for what, count in it.done.items():
            yield Figure(what, f"{count}")
        yield Figure("writes to the API server", f"{len(agent.node.writes)}")
        yield Figure("SIGTERM to exit", f"{agent.stop():.2f} s")


async def _held(agent: Agent) -> Held:
    inside = await agent.inside()
    return Held(agent.memory() / 1024, agent.threads(), agent.files(), inside.tasks, inside.objects)


def _curves(it: _Soak, warm: float) -> list[Figure]:
    """Each figure over the time, and whether it is flat once the agent is `warm` (seconds)."""
    figures = []
    names = (*GROWTH, "objects")
    columns = zip(*(astuple(held) for _, held in it.samples), strict=True)
    times = [at for at, _ in it.samples]
    for name, column in zip(names, columns, strict=True):
        points = list(zip(times, column, strict=True))
        rise = curve.risen([point for point in points if point[0] >= warm])
        allowed = GROWTH.get(name)
        target = "" if allowed is None else f"<= {allowed:g}"
        verdict = "" if allowed is None else ": flat" if rise <= allowed else ": GROWS"
        low, high = min(column), max(column)
        figures.append(Figure(f"{name}: {low:.4g} to {high:.4g}", curve.drawn(points)))
        risen = f"{rise:+.2f}{verdict}"
        figures.append(Figure(f"{name}, its rise after {warm / 60:g} minutes", risen, target))
    return figures


async def _again(
    done: Counter[str], name: str, pause: float, act: Callable[[], Awaitable[None]]
) -> None:
    while True:
        await asyncio.sleep(pause)
        await act()
        done[name] += 1


async def _calm(it: _Soak) -> None:
    """All is well again, wherever the work has left it."""
    agent = it.agent
    it.api, it.more = "device-plugin", ""
    it.edited()
    for number in range(8):
        await asyncio.to_thread(simulator.apply_fault, agent.root, f"npu{number}", "back")
    await agent.kubelet.stop()
    await agent.kubelet.start()
    await agent.manager.restart()
    await agent.until_healthy(8)
    await asyncio.sleep(10)


async def _scrape(it: _Soak) -> None:
    agent, chance = it.agent, it.chance
    page = chance.choice(("/metrics", "/metrics", "/metrics", "/", "/status.json", "/readyz"))
    headers = chance.choice((TEXT, PROMETHEUS))
    with contextlib.suppress(ConnectionError):  # /readyz says 503 while the kubelet is away
        await asyncio.to_thread(scrape, agent.port, page, headers, chance.choice((1, 4)), 2)
    await asyncio.to_thread(scrape, agent.probes, "/healthz", TEXT, 1, 1)


async def _pod(it: _Soak) -> None:
    kubelet = it.agent.kubelet
    # Refused where a card has just died or moved, or the kubelet is away.
    try:
        grant = await kubelet.allocate(RESOURCE, it.chance.choice((1, 2)))
    except (NotEnoughError, GRPCError, StreamTerminatedError, OSError, KeyError, TimeoutError):
        it.done["of which without a device"] += 1
        return
    try:
        await asyncio.sleep(1)
    finally:  # a core that stays held keeps devices of another shape from being offered
        kubelet.release(RESOURCE, grant.ids)


async def _claim(it: _Soak) -> None:
    agent, api = it.agent, it.agent.node
    instances = agent.manager.instances.value
    free = [name for name in api.devices() if name not in {*api.taints(), *it.claimed}]
    if not instances or not free:
        it.done["of which without a card"] += 1
        return
    driver = instances[-1].driver
    devices = it.chance.sample(free, min(len(free), it.chance.choice((1, 2))))
    claim = api.allocate(driver, f"claim-{it.done['claims']}", devices, pod="pod")
    it.claimed.update(devices)
    try:
        # Refused as an Allocate is; what is refused is unprepared as well, as the kubelet does it.
        with contextlib.suppress(PrepareError):
            await agent.manager.prepare(driver, claim)
            it.done["of which prepared"] += 1
            await asyncio.sleep(1)
        while True:
            with contextlib.suppress(PrepareError):
                await agent.manager.unprepare(driver, claim)
                break
            await asyncio.sleep(1)
    finally:
        it.claimed.difference_update(devices)
        api.forget(claim)


async def _fault(it: _Soak, faults: tuple[str, ...]) -> None:
    agent = it.agent
    card, fault = f"npu{it.chance.randrange(8)}", it.chance.choice(faults)
    await asyncio.to_thread(simulator.apply_fault, agent.root, card, fault)
    await asyncio.sleep(3)
    await asyncio.to_thread(simulator.apply_fault, agent.root, card, "back")


async def _edit(it: _Soak) -> None:
    it.more = it.chance.choice(
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
    it.edited()


async def _move(it: _Soak) -> None:
    it.api = "dra" if it.api == "device-plugin" else "device-plugin"
    it.edited()


async def _restart(it: _Soak) -> None:
    kubelet, manager = it.agent.kubelet, it.agent.manager
    await kubelet.stop()
    await manager.stop()
    await asyncio.sleep(1)
    await kubelet.start()
    await manager.start()
