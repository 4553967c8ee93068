"""Attacks on the agent's process: signals, limits, others of its kind, the clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator

from bench.process import RESOURCE
from tests.chaos.table import attack
from tests.chaos.world import World

PATIENT = "health: {interval: 2}\n"
"""On a busy machine half a second without an answer need not be the agent's fault."""


@attack(short=True, config=PATIENT)
async def agent_is_stopped(here: World) -> None:
    """The agent is stopped for five seconds (SIGSTOP, SIGCONT).

    It goes on where it was, and no card is fenced for it.
    """
    os.kill(here.pid, signal.SIGSTOP)
    await asyncio.sleep(5)
    os.kill(here.pid, signal.SIGCONT)
    await here.pod()
    assert "card unhealthy" not in here.said()


@attack()
async def second_agents(here: World) -> None:
    """A second agent is started on the node, and killed, five times.

    The first one keeps its registration.
    """
    with here.stays_registered():
        for _ in range(5):
            size = len(here.said())
            with here.agent.another():
                await here.logged("another agent serves this node", size)
    assert here.kubelet.plugins.value[RESOURCE].connected


async def killed_and_served(here: World, held: tuple[str, ...], wait: float) -> None:
    """Kills the agent after so many seconds; the next one must not hand out what is held."""
    await asyncio.sleep(wait)
    calls = here.kubelet.calls
    await here.start_again()
    await here.until(lambda: here.kubelet.calls > calls, "the next one to register")
    grant = await here.granted("another Pod")
    assert not set(grant.ids) & set(held), "handed out twice"
    here.kubelet.release(RESOURCE, grant.ids)


@attack(short=True)
async def agent_is_killed_at_random(here: World) -> None:
    """It is killed 15 times at random moments of its start and its work, while a Pod runs.

    The last one serves the other card, and nothing is left in the directories but its own files.
    """
    grant = await here.granted("runs-on")
    chance = random.Random(1)
    for _ in range(14):
        await here.start_again()
        await asyncio.sleep(chance.uniform(0, 1.5))
    await killed_and_served(here, grant.ids, 0.2)
    here.kubelet.release(RESOURCE, grant.ids)
    await here.pod()
    left = [path.name for path in here.plugins.iterdir()]
    assert sum(name.startswith("furiosa-npu") for name in left) == 1, left
    assert len(left) < 8, left


@contextlib.contextmanager
def limited(here: World, what: int, most: int) -> Iterator[None]:
    """The agent's process may take no more of something."""
    before = resource.prlimit(here.pid, what)
    resource.prlimit(here.pid, what, (most, before[1]))
    yield
    resource.prlimit(here.pid, what, before)


@attack(short=True, config=PATIENT)
async def no_more_descriptors(here: World) -> None:
    """No file can be opened any more (RLIMIT_NOFILE) for eight seconds, while pages are asked for.

    No card is fenced for it, and the log has less than a hundred lines on it.
    """
    size, end = len(here.said()), time.monotonic() + 8
    with limited(here, resource.RLIMIT_NOFILE, 3):
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", here.agent.port), timeout=1).close()
            await asyncio.sleep(0.05)
    await here.well()
    said = here.said()[size:]
    assert "card unhealthy" not in said
    assert len(said.splitlines()) < 100, f"{len(said.splitlines())} lines"


@attack(config=PATIENT)
async def no_more_memory(here: World) -> None:
    """It may take no more memory (RLIMIT_AS) for eight seconds, while it is asked for pages.

    A Pod runs meanwhile, so that the kubelet is asked more often. No card is fenced for it.
    """
    await here.granted("runs-on")
    end = time.monotonic() + 8
    with limited(here, resource.RLIMIT_AS, 1 << 20):
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                await here.get("/")
    await here.well()
    assert "card unhealthy" not in here.said()


@attack(short=True, config="allocation: {method: cdi}\n")
async def no_more_writing(here: World) -> None:
    """No file can be written any more (RLIMIT_FSIZE) for five seconds, while the config changes.

    It goes on, and the last config is in force when it can write again.
    """
    with limited(here, resource.RLIMIT_FSIZE, 0):
        here.configure("allocation: {method: cdi}\ndefaultPe: Single")
        await asyncio.sleep(5)
    here.devices = 4
    here.configure("allocation: {method: cdi}\ndefaultPe: Single\n# again")


@attack(short=True)
async def signals_without_end(here: World) -> None:
    """2,000 SIGHUP, SIGWINCH, SIGCHLD and SIGPIPE.

    It goes on as it was.
    """
    for number in range(2000):
        signals = (signal.SIGHUP, signal.SIGWINCH, signal.SIGCHLD, signal.SIGPIPE)
        os.kill(here.pid, signals[number % 4])
        if number % 100 == 0:
            await asyncio.sleep(0.01)
    await here.pod()


@attack(start=(sys.executable, "-m", "tests.chaos.clock"))
async def clock_jumps(here: World) -> None:
    """The clock jumps by an hour, a day and ten years, forwards and back, to 1970 and to 2262.

    No card is fenced for it; pages, labels and Pods go on.
    """
    for seconds in (3600, -3600, 86400, -86400, 315e6, -315e6, -1.7e9, 7.4e9):
        (here.agent.node.account / "clock").write_text(f"{seconds}", encoding="utf-8")
        await asyncio.sleep(1)
        await here.fault("npu0", "dead")
        await here.healthy(1)
        await here.pages()
        await here.fault("npu0", "ok")
        await here.well()
        await here.pod()
    (here.agent.node.account / "clock").unlink()


@attack(start=(sys.executable, "-m", "tests.chaos.mute"))
async def log_that_nobody_reads(here: World) -> None:
    """Nobody reads the agent's log, and the pipe to it is full.

    Pods get NPUs, probes are answered.
    """
    for _ in range(40):  # which it logs, each time
        await here.pod()
