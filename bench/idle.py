"""What the agent holds, and what it does while nothing happens, with everything on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from bench.figure import Figure
from bench.process import RESOURCE, Agent, running
from bench.scraper import PROMETHEUS, TEXT, scrape

_SCRAPE_EVERY = 15.0
"""Seconds between two scrapes, as the PodMonitor in k8s/ asks for."""


async def idle(seconds: float) -> AsyncIterator[Figure]:
    """Without a change but in the figures of the cards, which real ones change all the time."""
    async with running("warboy=4,rngd=4", alive=True) as agent:
        yield Figure("process start to registered", f"{agent.start:.2f} s", "0.4 to 0.7 s")
        await agent.settled()
        await asyncio.sleep(2)
        before, writes = await agent.told(), len(agent.node.writes)
        async for one in _spent(agent, seconds, "without a scraper", "0.25 to 0.5 %"):
            yield one
        grant = await agent.kubelet.allocate(RESOURCE, 8)
        await asyncio.sleep(5)
        async for one in _spent(agent, seconds, "Pods hold all cards", "<= 0.6 %"):
            yield one
        agent.kubelet.release(RESOURCE, grant.ids)
        scraper = asyncio.create_task(_scraping(agent.port))
        async for one in _spent(agent, seconds, "scraped every 15 s", "<= 0.7 %"):
            yield one
        scraper.cancel()
        sent = (await agent.told()).messages - before.messages
        yield Figure("ListAndWatch messages while idle", str(sent), "0")
        written = len(agent.node.writes) - writes
        yield Figure("writes to the API server while idle", str(written), "0")
        taken = f"{await asyncio.to_thread(agent.stop):.2f} s"  # the kubelet answers meanwhile
        yield Figure("SIGTERM to exit, kubelet connected", taken, "<= 0.3 s")
    for cards, dra in (("warboy=4,rngd=4", False), ("rngd=8", False), ("rngd=8", True)):
        async with running(cards, alive=True, dra=dra) as agent:
            await agent.settled()
            for page in ("/metrics", "/", "/status.json", "/readyz", "/healthz"):
                for headers in (TEXT, PROMETHEUS):
                    await asyncio.to_thread(scrape, agent.port, page, headers, 4, 20)
            await asyncio.sleep(10)
            memory = f"{agent.memory() / 1024:.1f} MiB"
            what = f"resident memory, {cards}{', DRA' if dra else ''}, all pages asked for"
            yield Figure(what, memory, "48 to 56 MiB")


async def _spent(agent: Agent, seconds: float, how: str, target: str) -> AsyncIterator[Figure]:
    """What the agent uses in so many seconds."""
    before = agent.spent()
    await asyncio.sleep(seconds)
    spent = agent.spent() - before
    cpu = f"{100 * spent.cpu / seconds:.2f} %"
    yield Figure(f"CPU while idle, {how}, {seconds:g} s", cpu, target)
    wakes = f"{spent.loop / seconds:.1f} / {spent.threads / seconds:.1f}"
    yield Figure(f"wake-ups a second, {how}: loop / process", wakes, "<= 4 /")


async def _scraping(port: int) -> None:
    """Asks for the page as Prometheus does, until cancelled."""
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.to_thread(scrape, port, "/metrics", PROMETHEUS, 1, 1)
            await asyncio.sleep(_SCRAPE_EVERY)
