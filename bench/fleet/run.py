"""The phases of a cluster's life, and what its API server was asked in each."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from bench.figure import HEADER, Figure
from bench.fleet.server import AGENTS, INFORMERS, ApiServer, Asked, Mark, most_nodes, peak, serving
from tests.cluster.build import KUBERNETES, ensure_own
from tests.until import until

_LOOK = 0.5
"""Seconds between two looks at what the agents say."""
_PATIENCE = 900.0
GO = Path(__file__).parent / "informers"
_LEASES = 4
"""Writes of others in a second, so that versions of objects go on as in a living cluster."""
_STEPS = 10
"""Of a rollout."""
_SYNC = 40.0
"""Seconds: client-go's controller looks at its slices once more after 30 s."""
_START = 20.0
"""Seconds after its return in which an API server is busy with its own start."""
_CALM = 15.0
"""Seconds after which a phase leaves nothing behind but what an idle agent does."""


class Workers:
    """The processes that the agents are in."""

    def __init__(self, processes: list[asyncio.subprocess.Process], sizes: list[int]) -> None:
        self._processes, self._sizes = processes, sizes
        self._lock = asyncio.Lock()
        self.nodes = sum(sizes)

    async def do(self, what: str, share: float = 1.0, spread: float = 0.0, skip: float = 0) -> None:
        """Has this share of each process's agents do it, at random within `spread` seconds."""
        async with self._lock:
            await asyncio.gather(
                *(
                    self._tell(
                        one, {"do": what, "of": [round(skip * size), upto], "spread": spread}
                    )
                    for one, size in zip(self._processes, self._sizes, strict=True)
                    if (upto := max(1, round((skip + share) * size)))
                )
            )

    async def one(self, what: str) -> None:
        """Has one agent do it."""
        await self._tell(self._processes[0], {"do": what, "of": [0, 1], "spread": 0.0})

    async def counts(self) -> dict[str, float]:
        """The sums of what they say."""
        async with self._lock:
            found = await asyncio.gather(
                *(self._tell(one, {"do": "count"}) for one in self._processes)
            )
        return {key: sum(each[key] for each in found) for key in found[0]}

    async def until_right(self) -> None:
        async def right() -> bool:
            return (await self.counts())["right"] == self.nodes

        await until(right, "all nodes to be right", deadline=_PATIENCE, interval=_LOOK)

    @staticmethod
    async def _tell(process: asyncio.subprocess.Process, order: dict[str, Any]) -> dict[str, float]:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(order).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of agents has ended: {process.returncode}")
        found: dict[str, float] = json.loads(line)
        return found


@contextlib.asynccontextmanager
async def workers(server: ApiServer, names: Sequence[str], each: int) -> AsyncIterator[Workers]:
    """Processes with so many agents each; none of these runs yet."""
    shares = [names[at : at + each] for at in range(0, len(names), each)]
    given = {"server": server.url, "login": "Bearer agents-token", "ca": str(server.ca)}
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.fleet.agents", json.dumps({**given, "names": share})),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for share in shares
    ]
    try:
        yield Workers(processes, [len(share) for share in shares])
    finally:
        for one in processes:
            one.kill()
            await one.wait()


@contextlib.asynccontextmanager
async def informers(server: ApiServer, program: Path, nodes: int) -> AsyncIterator[None]:
    """Drivers by client-go for so many nodes, in one process."""
    one = await asyncio.create_subprocess_exec(
        *(str(program), f"-server={server.url}", f"-ca={server.ca}", "-token=informers-token"),
        f"-nodes={nodes}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        one.kill()
        await one.wait()


@dataclass(frozen=True)
class Phase:
    """What was asked while something happened to so many nodes."""

    asked: list[Asked]
    began: float
    """From when on it counts, by the wall clock."""
    seconds: float
    """Until all was as it should be, from then on; infinite: it was not."""
    nodes: int

    def figures(self, what: str, soon: str = "") -> Iterator[Figure]:
        """How fast requests came, how many there were, and how long it took."""
        yield Figure(f"{what}: requests a second, most in 1 s / in 10 s", rates(self.asked))
        yield Figure(f"{what}: requests a node", kinds(self.asked, self.nodes))
        never = f"not within {_PATIENCE:g} s"
        taken = never if math.isinf(self.seconds) else f"{self.seconds:.1f} s"
        yield Figure(f"{what}: all right after", taken, soon)

    def returns(self, what: str) -> Iterator[Figure]:
        """The same for the first seconds of an API server, and for the time after these."""
        end = self.began + _START
        early = [one for one in self.asked if one.at < end]
        late = [one for one in self.asked if one.at >= end]
        for when, asked, target in (
            (f"the first {_START:g} s", early, ""),
            (f"from {_START:g} s on", late, f"<= {self.nodes / 50:g}"),
        ):
            most = most_nodes((one.at, one.node) for one in asked)
            yield Figure(f"{what}, {when}: nodes that ask, most in 1 s", f"{most}", target)
            yield Figure(f"{what}, {when}: requests a second", rates(asked))


def rates(asked: Sequence[Asked]) -> str:
    """The most in 1 s, and a second of the busiest 10 s."""
    times = [one.at for one in asked]
    return f"{peak(times, 1.0)} / {peak(times, 10.0) / 10:.0f}"


def kinds(asked: Sequence[Asked], nodes: int) -> str:
    """``3: 2 get nodes, 1 list resourceslices``, of a node, the most frequent first."""
    counts = Counter(f"{one.verb} {one.what.rpartition('/apis/')[2]}" for one in asked)
    each = ", ".join(f"{count / nodes:.3g} {what}" for what, count in counts.most_common())
    return f"{len(asked) / nodes:.3g}: {each}" if asked else "0"


class Fleet:
    """A cluster of Nodes without kubelets, and what its agents ask."""

    def __init__(self, server: ApiServer, nodes: int) -> None:
        self.server, self.nodes = server, nodes

    async def phase(
        self,
        user: str,
        act: Callable[[], Awaitable[float | None]],
        right: Callable[[], Awaitable[None]],
        *,
        watches: bool = False,
        nodes: int | None = None,
    ) -> Phase:
        """What is asked from now on until all is right, and a moment longer.

        Args:
            user: who asks.
            act: has it happen; returns from when on it counts, None: from its beginning.
            right: returns when all is as it should be.
            watches: whether each node has to open its watches for that.
            nodes: to how many it happens; None: to all.
        """
        began = self.server.mark()
        ready, took = began.time, math.inf
        with contextlib.suppress(AssertionError, TimeoutError):  # of `until`
            ready = await act() or ready
            await right()
            if watches:
                await self._until_watched(user, began)
            took = time.time() - ready
        await asyncio.sleep(_CALM)
        asked = await asyncio.to_thread(self.server.asked, user, began)
        return Phase(asked, ready, took, nodes or self.nodes)

    async def _until_watched(self, user: str, since: Mark) -> None:
        """Until each node has both watches, as far as their number tells."""

        async def enough() -> bool:
            asked = await asyncio.to_thread(self.server.asked, user, since)
            opened = sum(one.verb == "watch" and one.code == HTTPStatus.OK for one in asked)
            return opened >= 2 * self.nodes

        # The log of many nodes takes a while to read, on the cores of the API server.
        pause = 2 * _LOOK + self.nodes / 1000
        await until(enough, "the watches", deadline=_PATIENCE, interval=pause)

    async def idle(self, user: str, seconds: float) -> Idle:
        """What is asked while nothing happens."""
        server, began = self.server, self.server.mark()
        before = server.cpu()
        await asyncio.sleep(seconds)
        asked, lasted = server.asked(user, began), time.time() - began.time
        watches = [one for one in server.asked(user, Mark(0, 0)) if one.verb == "watch"]
        return Idle(asked, watches, lasted, server.cpu() - before, self.nodes)

    async def others(self) -> None:
        """Writes as others do, until cancelled."""
        body = {"metadata": {"name": "others"}, "data": {}}
        place = "/api/v1/namespaces/default/configmaps"
        for at in range(10**9):
            with contextlib.suppress(Exception):  # the API server may be away
                body["data"] = {"at": str(at)}
                await self.server.ask("POST", place, body)
                await self.server.ask("PUT", f"{place}/others", body)
            await asyncio.sleep(1 / _LEASES)


@dataclass(frozen=True)
class Idle:
    """What was asked while nothing happened."""

    asked: list[Asked]
    watches: list[Asked]
    """All since the start."""
    seconds: float
    cpu: float
    """Of the API server, in seconds."""
    nodes: int

    def figures(self, who: str) -> Iterator[Figure]:
        """Requests a node-hour.

        Those for watches are computed of the times that these were asked for, as one follows the
        other: a window that is shorter than these times has few of them or none.
        """
        lives = (re.search(r"timeoutSeconds=(\d+)", one.uri) for one in self.watches)
        life = statistics.mean(int(found[1]) for found in lives if found)
        others = [one for one in self.asked if one.verb != "watch"]
        hours = self.nodes * self.seconds / 3600
        what = f"{who}, idle {self.seconds:.0f} s"
        computed = f"{len(others) / hours + 2 * 3600 / life:.1f}"
        yield Figure(f"{what}: requests a node-hour, by the watches' times", computed, "<= 24")
        counted = f"{len(self.asked) / hours:.1f}, {len(self.asked)} in all"
        yield Figure(f"{what}: requests a node-hour, as counted", counted)
        yield Figure(f"{what}: writes", f"{sum(one.writes for one in self.asked)}", "0")
        yield Figure(f"{what}: CPU of the API server", f"{100 * self.cpu / self.seconds:.1f} %")


async def fleet(wanted: argparse.Namespace) -> AsyncIterator[Figure]:
    """All phases, one after the other."""
    names = [f"fleet-{at:05}" for at in range(wanted.nodes)]
    with tempfile.TemporaryDirectory(prefix="npu-fleet-") as directory:
        async with serving(Path(directory)) as server:
            await server.prepare(names)
            here = Fleet(server, wanted.nodes)
            others = asyncio.create_task(here.others())
            async with workers(server, names, wanted.each) as agents:
                async for one in _agents(here, agents, wanted):
                    yield one
            if wanted.informers:
                async for one in _informers(here, wanted):
                    yield one
            others.cancel()


async def _agents(
    here: Fleet, agents: Workers, wanted: argparse.Namespace
) -> AsyncIterator[Figure]:
    server, nodes = here.server, here.nodes
    plain = await server.stored("minions/")

    right, own = agents.until_right, await server.watches()
    within = nodes / 80 if wanted.start is None else wanted.start
    start = await here.phase(AGENTS, lambda: agents.do("start", spread=within), right, watches=True)
    for one in start.figures(f"first start of all within {within:g} s"):
        yield one
    watches = await server.watches() - own
    yield Figure("watches at the API server, a node", f"{watches / nodes:.3g}", "<= 2")
    slices, labelled = await server.stored("resourceslices/"), await server.stored("minions/")
    yield Figure("etcd: ResourceSlices of a node, 8 cards", f"{sum(slices) / nodes:.0f} bytes")
    more = (sum(labelled) - sum(plain)) / nodes
    yield Figure("etcd: what the labels add to a Node", f"{more:.0f} bytes")

    for one in (await here.idle(AGENTS, wanted.idle)).figures("agents"):
        yield one
    yield Figure("memory: API server / etcd", _memory(server))
    memory = (await agents.counts())["memory"] / nodes / 1024
    yield Figure("memory: the bench itself, a simulated agent", f"{memory:.0f} kB")

    async for one in _changes_of_one(here, agents, right):
        yield one
    async for one in _outages(here, wanted, AGENTS, right, agents):
        yield one

    async def rollout() -> None:
        for at in range(_STEPS):
            await agents.do("restart", share=1 / _STEPS, skip=at / _STEPS)
            await agents.until_right()

    rolled = await here.phase(AGENTS, rollout, right, watches=True)
    for one in rolled.figures("a rollout of the DaemonSet, a tenth at a time"):
        yield one
    rolled = await here.phase(
        AGENTS, lambda: agents.do("restart", spread=within), right, watches=True
    )
    for one in rolled.figures(f"all agents restart within {within:g} s"):
        yield one

    spread = wanted.spread
    change = await here.phase(AGENTS, lambda: agents.do("configure", spread=spread), right)
    for one in change.figures(f"a config for all nodes, read within {spread:g} s"):
        yield one


async def _changes_of_one(
    here: Fleet, agents: Workers, right: Callable[[], Awaitable[None]]
) -> AsyncIterator[Figure]:
    """What a fault on one node costs."""
    server = here.server
    before = await server.metrics()
    phase = await here.phase(AGENTS, lambda: agents.one("fault"), right, nodes=1)
    yield Figure("a card fails: requests", kinds(phase.asked, 1))
    answers = _answered(before, await server.metrics())
    yield Figure("a card fails: the API server's answers", f"{answers:.0f} bytes")
    events = sum(await server.stored("events/"))
    yield Figure("a card fails: etcd's Event", f"{events} bytes")
    phase = await here.phase(AGENTS, lambda: agents.one("recovery"), right, nodes=1)
    yield Figure("it recovers: requests", kinds(phase.asked, 1))
    plain = sum(await server.stored("minions/"))
    phase = await here.phase(AGENTS, lambda: agents.one("condition"), right, nodes=1)
    yield Figure("the Node condition is switched on: requests", kinds(phase.asked, 1))
    more = sum(await server.stored("minions/")) - plain
    yield Figure("etcd: what the condition adds to a Node", f"{more} bytes")
    await agents.one("no_condition")


async def _outages(
    here: Fleet,
    wanted: argparse.Namespace,
    user: str,
    right: Callable[[], Awaitable[None]],
    agents: Workers | None = None,
) -> AsyncIterator[Figure]:
    """The API server is killed; meanwhile a card fails on each tenth node."""
    for seconds in wanted.outages:
        await here.server.stop()
        stopped = time.time()
        if agents:
            await agents.do("fault", share=0.1)
        await asyncio.sleep(seconds)
        back = await here.phase(user, here.server.start, right, watches=True)
        away = f"{here.server.ready_at - stopped:.0f} s"
        yield Figure(f"the API server was away {seconds:g} s: with its own start", away)
        what = f"the API server was away {seconds:g} s"
        for one in (*back.figures(what, "<= 180 s"), *back.returns(what)):
            yield one
        if agents:
            await agents.do("recovery", share=0.1)
            await asyncio.sleep(_CALM)


async def _informers(here: Fleet, wanted: argparse.Namespace) -> AsyncIterator[Figure]:
    server, nodes = here.server, here.nodes
    program = await asyncio.to_thread(ensure_own, GO)

    async def right() -> None:
        """What it knows cannot be seen: its watches are counted."""

    async with contextlib.AsyncExitStack() as stack:
        start = await here.phase(
            INFORMERS,
            lambda: stack.enter_async_context(informers(server, program, nodes)),
            right,
            watches=True,
        )
        for one in start.figures("client-go: start of all"):
            yield one
        await asyncio.sleep(_SYNC)
        for one in (await here.idle(INFORMERS, wanted.idle)).figures("client-go"):
            yield one
        async for one in _outages(here, wanted, INFORMERS, right):
            yield replace(one, what=f"client-go: {one.what}")


def _memory(server: ApiServer) -> str:
    of = server.process.memory() if server.process else 0
    return f"{of / 1024:.0f} / {server.etcd.memory() / 1024:.0f} MiB"


def _answered(before: dict[str, float], after: dict[str, float]) -> float:
    """Bytes of the API server's answers about Nodes, slices and Events."""
    return sum(
        value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith("apiserver_response_sizes_sum")
        and re.search(r'resource="(nodes|events|resourceslices)"', name)
    )


async def main(arguments: Sequence[str]) -> None:
    """Prints the figures as they come, as a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, default=100, help="default: 100")
    parser.add_argument("--each", type=int, default=1250, help="agents in a process (1250)")
    parser.add_argument("--start", type=float, help="seconds for all to start (80 nodes a second)")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of doing nothing (60)")
    parser.add_argument(
        "--outages", type=float, nargs="*", default=[300.0], help="seconds without API server (300)"
    )
    parser.add_argument("--spread", type=float, default=60.0, help="seconds for a config (60)")
    parser.add_argument("--informers", action="store_true", help="also drivers by client-go")
    wanted = parser.parse_args(arguments)
    print(
        f"{wanted.nodes} nodes, Kubernetes {KUBERNETES.version}, {os.cpu_count()} cores; "
        f"load at the start {os.getloadavg()[0]:.1f}\n"
    )
    print(HEADER)
    async for one in fleet(wanted):
        print(one, flush=True)
