"""What a scrape costs, beside the exporter that runs on most nodes anyway."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from bench.figure import Figure, quantiles
from bench.process import DEADLINE, POLL, RESOURCE, Process, answers, free_port, program, running
from bench.scraper import PROMETHEUS, scrape
from npu_agent.people import simulator
from tests.until import until

EXPORTER = "prometheus-node-exporter"
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
    async for figure in exporter():
        yield figure


async def costs(process: Process, port: int, path: str, scrapers: int = 1) -> str:
    """How long an answer takes, and how much CPU time."""
    await asyncio.to_thread(scrape, port, path, PROMETHEUS, scrapers, 20)
    cpu = process.spent().cpu
    taken = await asyncio.to_thread(scrape, port, path, PROMETHEUS, scrapers, TIMES // scrapers)
    cpu = 1000 * (process.spent().cpu - cpu) / len(taken)
    return f"{quantiles(taken)}; {cpu:.2f} ms"


async def exporter() -> AsyncIterator[Figure]:
    """prometheus-node-exporter on this machine, the same way."""
    with tempfile.TemporaryDirectory(prefix="npu-bench-") as temporary:
        found = await asyncio.to_thread(node_exporter, Path(temporary))
        if found is None:
            yield Figure(f"{EXPORTER}: not on this machine, and not to be had by apt", "")
            return
        name = f"node_exporter {await asyncio.to_thread(version, found)}"
        port = free_port()
        with program(str(found), f"--web.listen-address=127.0.0.1:{port}") as process:
            await until(lambda: answers(port), interval=POLL)
            taken = await costs(process, port, "/metrics")
            yield Figure(f"{name}: /metrics, p50 / p99; CPU", taken)
            yield Figure(f"{name}: resident memory", f"{process.memory() / 1024:.1f} MiB")


def version(exporter: Path) -> str:
    """``1.5.0``."""
    said = subprocess.check_output(
        (exporter, "--version"), stderr=subprocess.STDOUT, text=True, timeout=DEADLINE
    )
    found = re.search(r"version (\S+)", said)
    return found[1] if found else said.strip()


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
