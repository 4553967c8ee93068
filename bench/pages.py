"""What a scrape costs, beside the exporter that runs on most nodes anyway."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from bench.figure import Figure, quantiles
from bench.process import DEADLINE, POLL, RESOURCE, Process, answers, free_port, program, running
from bench.scraper import PROMETHEUS, TEXT, scrape
from npu_agent import simulator
from tests.until import until

EXPORTER = "prometheus-node-exporter"
TIMES = 2000
WAYS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("as text", TEXT),
    ("OpenMetrics, gzip", PROMETHEUS),
)


async def scrapes() -> AsyncIterator[Figure]:
    """8 cards of 8 cores, each held by a Pod."""
    async with running("rngd=8", alive=True) as agent:
        await agent.settled()
        for number in range(8):
            await agent.kubelet.allocate(RESOURCE, 1, pod=f"pod-{number}")
        await asyncio.sleep(7)  # until the page names the Pods
        for way, headers in WAYS:
            for scrapers in (1, 8):
                target = "p50 <= 3 ms" if scrapers == 1 else ""
                async for figure in costs(agent, agent.port, "/metrics", way, headers, scrapers):
                    yield Figure(figure.what, figure.measured, target)
                    target = ""
        taken = await asyncio.to_thread(scrape, agent.port, "/metrics", PROMETHEUS, 1, 20, 1.1)
        yield Figure(
            "a scrape each 1.1 s, when the agent's own part is due: p50 / max",
            f"{1000 * sorted(taken)[10]:.2f} / {1000 * max(taken):.2f} ms",
        )
        async for figure in costs(agent, agent.port, "/", "gzip", PROMETHEUS, 1):
            yield figure
        await asyncio.to_thread(simulator.apply_fault, agent.root, "npu0", "hang")
        await agent.until_healthy(7)
        target = "no slower"
        async for figure in costs(
            agent, agent.port, "/metrics", "gzip, one card hangs", PROMETHEUS, 1
        ):
            yield Figure(figure.what, figure.measured, target)
            target = ""
    async for figure in exporter():
        yield figure


async def costs(
    process: Process, port: int, path: str, way: str, headers: Mapping[str, str], scrapers: int
) -> AsyncIterator[Figure]:
    """How long an answer takes, and how much CPU time."""
    await asyncio.to_thread(scrape, port, path, headers, scrapers, 20)
    cpu = process.spent().cpu
    taken = await asyncio.to_thread(scrape, port, path, headers, scrapers, TIMES // scrapers)
    cpu = 1000 * (process.spent().cpu - cpu) / len(taken)
    what = f"{path}, {way}" + (f", {scrapers} scrapers" if scrapers > 1 else "")
    yield Figure(f"{what}: p50 / p99", quantiles(taken))
    yield Figure(f"{what}: CPU each", f"{cpu:.2f} ms")


async def exporter() -> AsyncIterator[Figure]:
    """prometheus-node-exporter on this machine, the same way."""
    with tempfile.TemporaryDirectory(prefix="npu-bench-") as temporary:
        found = await asyncio.to_thread(node_exporter, Path(temporary))
        if found is None:
            yield Figure(f"{EXPORTER}: not on this machine, and not to be had by apt", "")
            return
        port = free_port()
        with program(str(found), f"--web.listen-address=127.0.0.1:{port}") as process:
            await until(lambda: answers(port), interval=POLL)
            for way, headers in WAYS:
                async for figure in costs(process, port, "/metrics", way, headers, 1):
                    yield Figure(f"{EXPORTER} {figure.what}", figure.measured)
            memory = f"{process.memory() / 1024:.1f} MiB"
            yield Figure(f"{EXPORTER}: resident memory", memory)


def node_exporter(directory: Path) -> Path | None:
    """The program, if need be from Debian's package, which is unpacked and not installed."""
    if there := shutil.which(EXPORTER):
        return Path(there)
    for command in (
        ("apt-get", "download", "-qq", EXPORTER),
        ("sh", "-c", f"dpkg-deb -x {EXPORTER}_*.deb ."),
    ):
        try:
            subprocess.run(
                command, cwd=directory, check=True, capture_output=True, timeout=5 * DEADLINE
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return directory / "usr/bin" / EXPORTER
