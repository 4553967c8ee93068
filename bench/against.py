"""This commit and another one in turns: on a noisy machine ratios are what one can believe."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from bench.claims import prepares
from bench.figure import median
from bench.idle import SCRAPE_EVERY, scraping
from bench.plugin import allocation, times
from bench.process import RESOURCE, ROOT, Agent, running

SETTLED = 10.0
"""Seconds after the start: the templates of the page are compiled."""


async def main(revision: str, rounds: int, seconds: float) -> None:
    """Prints a row for each figure: both medians, and the ratio with its least and its most."""
    with _checkout(revision) as other:
        measured: dict[Path, dict[str, list[float]]] = {ROOT: {}, other: {}}
        for round_ in range(rounds):
            # In turns, and not always the same one first.
            for code in (ROOT, other) if round_ % 2 else (other, ROOT):
                async for what, value in _figures(code, seconds):
                    measured[code].setdefault(what, []).append(value)
                    name = revision if code == other else "this"
                    print(f"round {round_ + 1}, {name}: {what} {value:.3f}", file=sys.stderr)
        print(table(measured[ROOT], measured[other], revision))


def table(
    ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]], name: str
) -> str:
    """The rows of all figures, as a table in Markdown."""
    lines = [f"| figure | this | {name} | this / {name}, least to most |", "|---|---|---|---|"]
    for what, values in ours.items():
        others = theirs[what]
        ratios = [mine / other for mine, other in zip(values, others, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        both = (f"{statistics.median(each):.2f}" for each in (values, others))
        lines.append(f"| {what} | {' | '.join(both)} | {ratio} |")
    return "\n".join(lines)


@contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    """A checkout of another commit, which runs with the packages of this environment."""
    with tempfile.TemporaryDirectory(prefix="npu-bench-against-") as directory:
        checkout = Path(directory, "checkout")
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", checkout, revision], check=True)
        try:
            subprocess.run([sys.executable, "docs/runbook.py"], cwd=checkout, check=True)
            yield checkout
        finally:
            subprocess.run([*git, "remove", "--force", checkout], check=True)


async def _figures(code: Path, seconds: float) -> AsyncIterator[tuple[str, float]]:
    """The figures of one commit: name with unit, and value."""
    async with running("warboy=4,rngd=4", alive=True, code=code) as agent:
        yield "start to registered, s", agent.start
        await agent.settled()
        await asyncio.sleep(SETTLED)
        for how, state in (
            ("idle, unscraped", _alone),
            ("idle, Pods on all cards", _held),
            ("idle, scraped every 15 s", _scraped),
        ):
            async with state(agent):
                before = agent.spent()
                await asyncio.sleep(seconds)
                spent = agent.spent() - before
            yield f"{how}: CPU, %", 100 * spent.cpu / seconds
            yield f"{how}: wake-ups a second", spent.loop / seconds
        yield "resident memory, MiB", agent.memory() / 1024
    async with running("rngd=8", config="defaultPe: Single\n", code=code) as agent:
        await agent.settled()
        plugin = await agent.listed()
        socket = agent.plugins / plugin.endpoint
        ids = list(plugin.healthy())
        calls = (
            ("the empty call", "GetDevicePluginOptions", b""),
            ("Allocate", "Allocate", allocation(ids[:1])),
        )
        for what, method, request in calls:
            yield f"{what}, p50 ms", median(await asyncio.to_thread(times, socket, method, request))
    async with running("rngd=8", dra=True, code=code) as agent:
        await agent.settled()
        for cards in (1, 8):
            yield f"Prepare of {cards}, p50 ms", median((await prepares(agent, cards))[0])


@asynccontextmanager
async def _alone(_: Agent) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def _held(agent: Agent) -> AsyncIterator[None]:
    grant = await agent.kubelet.allocate(RESOURCE, 8)
    await asyncio.sleep(5)
    yield
    agent.kubelet.release(RESOURCE, grant.ids)


@asynccontextmanager
async def _scraped(agent: Agent) -> AsyncIterator[None]:
    scraper = asyncio.create_task(scraping(agent.port))
    await asyncio.sleep(SCRAPE_EVERY)
    yield
    scraper.cancel()
