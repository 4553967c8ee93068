"""What attacks are played on, and what has to hold after each of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpclib.exceptions import GRPCError

from bench.process import POLL, RESOURCE, Agent, Process, answers, running
from npu_agent.people import simulator
from npu_agent.people.simulator.kubelet import GivenDevices, NotEnoughError
from tests.kubelet.kubelet import FaultyKubelet
from tests.until import until

WELL = 120.0
"""Seconds within which all has to be well again; on an idle machine it takes one or two."""
END = 30.0
"""Seconds from SIGTERM to the exit that are no failure; on an idle machine it is one."""
MOST = 160 << 10
"""kB of memory that the agent may have at any moment: the limit of its Pod in k8s/."""
LOG = 200_000
"""Characters of log that an attack may cause: whoever can fill it can fill a disk."""


def become(path: Path, what: str) -> None:
    """Puts something else in the place of a file, or nothing: see the names below, or a target."""
    remove(path)
    match what:
        case "missing":
            pass
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "empty":
            path.touch()
        case "sparse":  # which takes no place on the disk
            with path.open("wb") as file:
                file.truncate(4 << 30)
        case "noise":
            path.write_bytes(b"\x1b[2J\x00\r\nX-Injected: yes\xff" * 500)
        case target:
            path.symlink_to(target)


def remove(path: Path) -> None:
    """Removes what is there, if anything is; a process that waits to read a pipe is let go."""
    with contextlib.suppress(OSError):
        if path.is_fifo() and not path.is_symlink():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced(path: Path, what: str) -> Iterator[None]:
    """Something else is in the place of a file meanwhile: see `become`."""
    content = path.read_bytes()
    become(path, what)
    yield
    remove(path)
    path.write_bytes(content)


@dataclass
class World:
    """An agent with its cards, all that it speaks to, and its log."""

    agent: Agent
    log: Path
    process: Process
    """The agent that runs now."""
    devices: int
    """How many there are when all is well."""
    _stack: ExitStack

    @property
    def kubelet(self) -> FaultyKubelet:
        return self.agent.kubelet

    @property
    def pid(self) -> int:
        """Of the agent."""
        return self.process.popen.pid

    @property
    def plugins(self) -> Path:
        """The kubelet's directory for device plugins."""
        return self.agent.plugins

    @property
    def root(self) -> Path:
        """Of the simulated host."""
        return self.agent.root

    def said(self) -> str:
        """What the agent has logged so far."""
        return self.log.read_text(errors="replace", encoding="utf-8")

    async def logged(self, words: str, after: int = 0) -> None:
        """Waits until the log says something, behind its first `after` characters."""
        await self.until(lambda: words in self.said()[after:], f"the log to say {words!r}")

    async def granted(self, pod: str) -> GivenDevices:
        """Starts a Pod with one device, as soon as there is one for it."""

        async def ask() -> GivenDevices | None:
            try:
                return await self.kubelet.allocate(RESOURCE, 1, pod)
            except (NotEnoughError, GRPCError, OSError, KeyError):
                return None

        grant: GivenDevices = await self.until(ask, f"{pod} to get an NPU")
        return grant

    async def pod(self) -> GivenDevices:
        """Starts a Pod with one device, and lets it end."""
        grant = await self.granted("a Pod")
        self.kubelet.release(RESOURCE, grant.ids)
        return grant

    async def well(self) -> None:
        """Waits until the kubelet holds a stream on which all devices are healthy."""
        await self.healthy(self.devices)

    async def healthy(self, devices: int) -> None:
        """Waits until so many of them are."""
        try:
            await self.kubelet.until(RESOURCE, lambda p: len(p.healthy()) == devices, WELL)
        except TimeoutError:
            known = self.kubelet.plugins.value.get(RESOURCE)
            raise AssertionError(f"not {devices} healthy devices, but {known}") from None

    @asynccontextmanager
    async def registers(self) -> AsyncIterator[None]:
        """Waits at its end until the agent has registered since its beginning, and is well."""
        before = self.kubelet.calls
        yield
        await self.until(lambda: self.kubelet.calls > before, "the agent to register")
        await self.well()

    @contextlib.contextmanager
    def stays_registered(self) -> Iterator[None]:
        """Asserts that the agent does not register meanwhile."""
        before = self.kubelet.calls
        yield
        assert self.kubelet.calls == before

    async def restart_kubelet(self) -> None:
        """Stops the kubelet and starts it: waits until the agent is registered again, and well."""
        await self.kubelet.stop()
        async with self.registers():
            await self.kubelet.start()

    @contextlib.contextmanager
    def grows_by(self, mib: int) -> Iterator[None]:
        """Asserts that the agent takes at most so much more memory after than before."""
        before = self.process.memory()
        yield
        grown = self.process.memory() - before
        assert grown < mib << 10, f"{grown >> 10} MiB more"

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits for a condition, and returns its value."""
        return await until(condition, what, deadline=WELL, interval=POLL)

    async def pages(self) -> dict[str, bytes]:
        """The agent's pages, none of which may steer a terminal."""
        found = {path: await self.page(path) for path in ("/", "/status.json", "/metrics")}
        assert not [path for path, body in found.items() if b"\x1b" in body]
        return found

    async def kill(self) -> None:
        """Kills the agent."""
        self.process.popen.kill()
        await asyncio.to_thread(self.process.popen.wait)

    async def ends(self) -> None:
        """Ends the agent by SIGTERM."""
        self.process.popen.terminate()
        assert await asyncio.to_thread(self.process.popen.wait, 20) == 0

    async def fault(self, card: str, fault: str) -> None:
        """Breaks or repairs a card."""
        await asyncio.to_thread(simulator.apply_fault, self.root, card, fault)

    async def get(self, path: str, port: int = 0) -> tuple[int, bytes]:
        """Status and body of one of the agent's pages, on a connection of its own."""

        def ask() -> tuple[int, bytes]:
            try:
                url = f"http://127.0.0.1:{port or self.agent.port}{path}"
                with urllib.request.urlopen(url, timeout=5.0) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read()

        return await asyncio.to_thread(ask)

    async def page(self, path: str) -> bytes:
        """A page, as soon as the agent serves it."""

        async def ask() -> bytes | None:
            try:
                status, body = await self.get(path)
            except OSError:
                return None
            return body if status == 200 else None

        body: bytes = await self.until(ask, f"the page {path}")
        return body

    async def alive(self) -> bool:
        """Whether the kubelet's liveness probe is answered; it asks three times."""
        for _ in range(3):
            with contextlib.suppress(OSError):
                return (await self.get("/healthz", self.agent.probes))[0] == 200
        return False

    async def works(self, card: str) -> None:
        """Waits until the agent's own page says that a card is healthy."""

        async def ask() -> bool:
            cards: list[dict[str, Any]] = json.loads(await self.page("/status.json"))["cards"]
            return any(c["name"] == card and c["health"]["state"] == "healthy" for c in cards)

        await self.until(ask, f"{card} to be healthy")

    def configure(self, text: str) -> None:
        """Replaces what the config file says besides where the agent is."""
        kept = self.agent.config.read_text(encoding="utf-8").splitlines()[:2]
        self.agent.config.write_text("\n".join((*kept, text, "")), encoding="utf-8")

    async def start_again(self) -> None:
        """Kills the agent, and starts one in its place."""
        await self.kill()
        self.process = self._stack.enter_context(self.agent.another())


def cores(grant: GivenDevices) -> set[tuple[int, int]]:
    """Card and number of each core that a container was given, of ``npu0pe0-1,npu1pe0``."""
    found = set()
    for part in grant.environment["NPU_DEVNAME"].split(","):
        card, _, range_ = part.removeprefix("npu").partition("pe")
        first, _, last = range_.partition("-")
        found |= {(int(card), core) for core in range(int(first), int(last or first) + 1)}
    return found


@asynccontextmanager
async def world(
    directory: Path,
    cards: str,
    config: str,
    start: tuple[str, ...],
    prepare: Callable[[Path], AbstractContextManager[object]],
) -> AsyncIterator[World]:
    """An agent that is well: registered, its pages served and its labels on the Node."""
    log = directory / "agent.log"
    log.touch()
    async with running(cards, config=config, log=log, start=start, prepare=prepare) as agent:

        def ready() -> bool:
            return bool(agent.node.labels) and answers(agent.port)

        await until(ready, "labels and pages", deadline=WELL, interval=POLL)
        devices = len(simulator.parse_cards(cards))
        with ExitStack() as stack:
            here = World(agent, log, agent, devices, stack)
            await here.well()
            yield here


async def withstood(here: World, attack: Callable[[World], Awaitable[None]]) -> None:
    """Plays an attack, and asserts what has to hold after any."""
    await attack(here)
    popen = here.process.popen
    assert popen.poll() is None, f"the agent has ended with {popen.returncode}"
    await here.well()
    here.kubelet.taken.clear()  # the Pods of the attack have ended
    grants = [await here.granted(f"pod-{number}") for number in range(here.devices)]
    held = [core for grant in grants for core in cores(grant)]
    assert len(held) == len(set(held)), f"handed out twice: {sorted(held)}"
    await here.until(here.alive, "a probe to be answered")
    assert b"npu_agent_build_info" in await here.page("/metrics")
    peak = here.process.peak()
    assert peak < MOST, f"{peak >> 10} MiB at its peak"
    popen.send_signal(signal.SIGTERM)
    await until(
        lambda: popen.poll() is not None, "the exit after SIGTERM", deadline=END, interval=POLL
    )
    assert popen.returncode == 0, f"exit code {popen.returncode}"
    said = here.said()
    assert "Traceback" not in said, "a traceback in the log"
    assert "\x1b" not in said, "the log can steer a terminal"
    assert len(said) < LOG, f"{len(said)} characters of log"
