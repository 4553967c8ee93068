"""What the agent holds, and what it does while nothing happens, with everything on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from bench.figure import Figure
from bench.process import running
from bench.scraper import PROMETHEUS, TEXT, scrape


async def idle(seconds: float) -> AsyncIterator[Figure]:
    """Without a change but in the figures of the cards, which real ones change all the time."""
    async with running("warboy=4,rngd=4", alive=True) as agent:
        yield Figure("process start to registered", f"{agent.start:.2f} s", "<= 1 s")
        await agent.settled()
        await asyncio.sleep(2)
        before, cpu, writes = await agent.told(), agent.cpu(), agent.node.writes
        await asyncio.sleep(seconds)
        cpu = 100 * (agent.cpu() - cpu) / seconds
        yield Figure(f"CPU while idle, over {seconds:g} s", f"{cpu:.2f} %", "<= 0.5 %")
        sent = (await agent.told()).messages - before.messages
        yield Figure("ListAndWatch messages while idle", str(sent), "0", "0 to 4")
        written = agent.node.writes - writes
        yield Figure("writes to the API server while idle", str(written), "0")
        taken = f"{await asyncio.to_thread(agent.stop):.2f} s"  # the kubelet answers meanwhile
        yield Figure("SIGTERM to exit, kubelet connected", taken, "<= 1 s")
    for cards in ("warboy=4,rngd=4", "rngd=8"):
        async with running(cards, alive=True) as agent:
            await agent.settled()
            for page in ("/metrics", "/", "/status.json", "/readyz", "/healthz"):
                for headers in (TEXT, PROMETHEUS):
                    await asyncio.to_thread(scrape, agent.port, page, headers, 4, 20)
            await asyncio.sleep(10)
            memory = f"{agent.memory() / 1024:.1f} MiB"
            what = f"resident memory, {cards}, all pages asked for"
            yield Figure(what, memory, "<= 50 MB", "81 MiB (three processes)")
