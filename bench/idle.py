"""What the agent holds, and what it does while nothing happens, with everything on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from bench.figure import Figure
from bench.process import RESOURCE, Agent, running
from bench.scraper import PROMETHEUS, TEXT, scrape

SCRAPE_EVERY = 15.0
"""Seconds between two scrapes, as the PodMonitor in k8s/ asks for."""


async def idle(seconds: float) -> AsyncIterator[Figure]:
    """Without a change but in the figures of the cards, which real ones change all the time."""
    async with running("warboy=4,rngd=4", alive=True) as agent:
        yield Figure("process start to registered", f"{agent.start:.2f} s", "0.4 to 0.7 s")
        await agent.settled()
        await asyncio.sleep(8)  # until the page's templates are compiled
        before, writes = await agent.listed(), len(agent.node.writes)
        yield await _spent(agent, seconds, "without a scraper", "<= 0.35 of 66a95401")
        grant = await agent.kubelet.allocate(RESOURCE, 8)
        await asyncio.sleep(5)
        yield await _spent(agent, seconds, "Pods hold all cards", "<= 0.45 of it")
        agent.kubelet.release(RESOURCE, grant.ids)
        scraper = asyncio.create_task(scraping(agent.port))
        await asyncio.sleep(SCRAPE_EVERY)
        yield await _spent(agent, seconds, "scraped every 15 s", "<= 0.7 of it")
        scraper.cancel()
        sent = (await agent.listed()).messages - before.messages
        written = len(agent.node.writes) - writes
        what = "while idle: ListAndWatch messages; writes to the API server"
        yield Figure(what, f"{sent}; {written}", "0; 0")
        taken = f"{await asyncio.to_thread(agent.stop):.2f} s"  # the kubelet answers meanwhile
        yield Figure("SIGTERM to exit, kubelet connected", taken, "<= 0.3 s")
    for dra in (False, True):
        async with running("rngd=8", alive=True, dra=dra) as agent:
            await agent.settled()
            for page in ("/metrics", "/", "/status.json", "/readyz", "/healthz"):
                for headers in (TEXT, PROMETHEUS):
                    await asyncio.to_thread(scrape, agent.port, page, headers, 4, 20)
            await asyncio.sleep(10)
            memory = f"{agent.memory() / 1024:.1f} MiB"
            what = f"resident memory, 8 RNGD, {'DRA' if dra else 'device plugin'}"
            yield Figure(what, memory, "at most 80 MiB")


async def _spent(agent: Agent, seconds: float, how: str, target: str) -> Figure:
    """What the agent uses in so many seconds."""
    before = agent.spent()
    await asyncio.sleep(seconds)
    spent = agent.spent() - before
    cpu, wakes = 100 * spent.cpu / seconds, spent.loop / seconds
    return Figure(
        f"idle, {how}: CPU; wake-ups a second", f"{cpu:.2f} %; {wakes:.1f}", f"{target}; <= 2"
    )


async def scraping(port: int) -> None:
    """Asks for the page as Prometheus does, until cancelled."""
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.to_thread(scrape, port, "/metrics", PROMETHEUS, 1, 1)
            await asyncio.sleep(SCRAPE_EVERY)
