"""What a scrape costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from bench.figure import Figure, quantiles
from bench.process import RESOURCE, Process, running
from bench.scraper import PROMETHEUS, scrape
from npu_agent.people import simulator

TIMES = 2000


async def scrapes() -> AsyncIterator[Figure]:
    """8 cards of 8 cores, each held by a Pod."""
    async with running("rngd=8", alive=True) as agent:
        await agent.settled()
        for number in range(8):
            await agent.kubelet.allocate(RESOURCE, 1, pod=f"pod-{number}")
        await asyncio.sleep(7)  # until the page names the Pods
        page = partial(costs, agent, agent.port)
        yield Figure("/metrics, p50 / p99; CPU", await page("/metrics"), "p50 <= 3 ms")
        yield Figure("/metrics, 8 scrapers, p50 / p99; CPU", await page("/metrics", scrapers=8))
        taken = await asyncio.to_thread(scrape, agent.port, "/metrics", PROMETHEUS, 1, 20, 1.1)
        yield Figure(
            "/metrics once every 1.1 s, p50 / max",
            f"{1000 * sorted(taken)[10]:.2f} / {1000 * max(taken):.2f} ms",
        )
        yield Figure("/, p50 / p99; CPU", await page("/"))
        await asyncio.to_thread(simulator.apply_fault, agent.root, "npu0", "hang")
        await agent.until_healthy(7)
        what = "/metrics, one card hangs, p50 / p99; CPU"
        yield Figure(what, await page("/metrics"), "no slower")


async def costs(process: Process, port: int, path: str, scrapers: int = 1) -> str:
    """How long an answer takes, and how much CPU time."""
    await asyncio.to_thread(scrape, port, path, PROMETHEUS, scrapers, 20)
    cpu = process.spent().cpu
    taken = await asyncio.to_thread(scrape, port, path, PROMETHEUS, scrapers, TIMES // scrapers)
    cpu = 1000 * (process.spent().cpu - cpu) / len(taken)
    return f"{quantiles(taken)}; {cpu:.2f} ms"
