"""The agent, or a program beside it, as a process of its own, and what that costs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from bench.apiserver import Node, node
from bench.pod import COUNTED
from npu_agent.people import simulator
from npu_agent.people.simulator.kubelet import ListedPlugin
from npu_agent.people.simulator.pluginmanager import StandInPluginManager
from tests.kubelet.kubelet import FaultyKubelet
from tests.until import until

RESOURCE = "beta.furiosa.ai/npu"
DEADLINE = 240.0
POLL = 0.05
"""Seconds between two looks at what other processes do: it must not disturb what is measured."""
ROOT = Path(__file__).parents[1]
NPU_AGENT = (sys.executable, "-m", "npu_agent")
IN_POD = (sys.executable, "-m", "bench.pod")


@dataclass(frozen=True)
class Spent:
    """What a process has used since its start, as the kernel's scheduler counts it."""

    cpu: float
    """Seconds on a CPU, of all threads that are there now."""
    loop: int
    """How often its first thread, on which the event loop runs, went to sleep: as often it woke."""
    all_threads: int
    """The same of all threads that are there now."""

    def __sub__(self, before: Spent) -> Spent:
        return Spent(
            self.cpu - before.cpu,
            self.loop - before.loop,
            self.all_threads - before.all_threads,
        )


@dataclass(frozen=True)
class Inside:
    """What only a process itself can count."""

    tasks: int
    """Of its event loop, that have not ended."""
    objects: int
    """That its garbage collector knows, garbage that it has not collected yet among them."""
    modules: list[str]
    """Files of the package that it has loaded, but for the generated ones."""


@dataclass(frozen=True)
class Process:
    """A running program."""

    popen: subprocess.Popen[bytes]

    def memory(self) -> int:
        """Resident, in kB."""
        return self._status("VmRSS:")

    def peak(self) -> int:
        """The most that was ever resident, in kB."""
        return self._status("VmHWM:")

    def threads(self) -> int:
        """How many it has."""
        return self._status("Threads:")

    def files(self) -> int:
        """How many it has open."""
        return sum(1 for _ in Path(f"/proc/{self.popen.pid}/fd").iterdir())

    def spent(self) -> Spent:
        """What it has used so far, by figures that are finer than the ticks of /proc/PID/stat."""
        cpu = loop = every = 0
        for thread in Path(f"/proc/{self.popen.pid}/task").iterdir():
            with suppress(OSError):  # one that has ended meanwhile
                cpu += int((thread / "schedstat").read_bytes().split()[0])
                status = (thread / "status").read_text(encoding="utf-8")
                wakes = _value(status, "voluntary_ctxt_switches:")
                every += wakes
                if int(thread.name) == self.popen.pid:
                    loop = wakes
        return Spent(cpu / 1e9, loop, every)

    def stop(self) -> float:
        """Seconds from SIGTERM to the exit."""
        began = time.perf_counter()
        self.popen.send_signal(signal.SIGTERM)
        self.popen.wait(DEADLINE)
        return time.perf_counter() - began

    def _status(self, key: str) -> int:
        return _value(Path(f"/proc/{self.popen.pid}/status").read_text(encoding="utf-8"), key)


def _value(text: str, key: str) -> int:
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(key))


@dataclass(frozen=True)
class Agent(Process):
    """A running agent, its kubelet, and its Node at the API server."""

    kubelet: FaultyKubelet
    manager: StandInPluginManager
    """The part of the kubelet that DRA drivers register with."""
    node: Node
    root: Path
    """Of the simulated driver tree."""
    plugins: Path
    """The kubelet's directory."""
    config: Path
    """The agent's config file."""
    port: int
    """Where it serves its pages."""
    probes: int
    """Where the kubelet probes it."""
    start: float
    """Seconds from the start of the process until the kubelet had its list, or the API server its
    slices."""
    another: Callable[[], AbstractContextManager[Process]]
    """Runs one more of the same meanwhile."""

    async def listed(self, after: str = "") -> ListedPlugin:
        """What the kubelet knows, once it has a list from another socket than `after`."""
        return await _listed(self.kubelet, after)

    async def until_healthy(self, devices: int) -> ListedPlugin:
        """What the kubelet knows, once so many devices are healthy."""
        return await self.kubelet.until(RESOURCE, lambda p: len(p.healthy()) == devices, DEADLINE)

    async def inside(self) -> Inside:
        """What is in it now; a FileNotFoundError if it has ended."""
        counted = self.node.account.with_name(COUNTED)
        counted.unlink(missing_ok=True)
        self.popen.send_signal(signal.SIGUSR1)
        await until(lambda: counted.exists() or self.popen.poll() is not None, interval=POLL)
        return Inside(**json.loads(counted.read_bytes()))

    async def settled(self) -> None:
        """Waits until it serves pages and its labels are on the Node."""
        await until(lambda: bool(self.node.labels) and answers(self.port), interval=POLL)


async def _listed(kubelet: FaultyKubelet, after: str = "") -> ListedPlugin:
    return await kubelet.until(RESOURCE, lambda p: p.messages > 0 and p.endpoint != after, DEADLINE)


@contextmanager
def program(
    *command: str,
    environment: Mapping[str, str] | None = None,
    log: Path = Path(os.devnull),
    code: Path = ROOT,
) -> Iterator[Process]:
    """Runs it meanwhile; what it logs is added to a file. `code` is its working directory."""
    with log.open("ab") as stderr:
        popen = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, **(environment or {})},
            cwd=code,
        )
    try:
        yield Process(popen)
    finally:
        popen.kill()
        popen.wait()


def image(code: Path = ROOT) -> dict[str, str]:
    """The environment of the image of a checkout, in which its agent is measured."""
    containerfile = (code / "Containerfile").read_text(encoding="utf-8")
    return dict(re.findall(r"(\w+)=(\S+)", containerfile.rpartition("ENV PATH=")[2]))


@cache
def _compile(code: Path) -> None:
    """Compiles a package and what it loads, as it is in the image: else each start would."""
    # By this commit's modules: an older one has others, and the same libraries.
    loads = (
        "import npu_agent.agent.run, npu_agent.cli.main, npu_agent.cli.run, yaml, "
        "npu_agent.outputs.web.connections, npu_agent.outputs.web.page, "
        "kubernetes_asyncio.config"
    )
    environment = {**os.environ, **image(code), "PYTHONDONTWRITEBYTECODE": ""}
    for command, at in ((("-c", loads), ROOT), (("-m", "compileall", "-q", "npu_agent"), code)):
        subprocess.run([sys.executable, *command], env=environment, cwd=at, check=True)


@asynccontextmanager
async def running(
    cards: str,
    *,
    config: str = "",
    alive: bool = False,
    dra: bool = False,
    start: tuple[str, ...] = IN_POD,
    log: Path = Path(os.devnull),
    prepare: Callable[[Path], AbstractContextManager[object]] = nullcontext,
    code: Path = ROOT,
) -> AsyncIterator[Agent]:
    """The agent with everything on, registered.

    Args:
        cards: the simulated cards, as `npu-agent simulate --cards` takes them.
        config: lines for its config file.
        alive: whether the cards' figures change all the time, as those of real ones do.
        dra: whether it offers the cards by DRA, and not by the device plugin.
        start: what starts it; the directory of its service account and its arguments follow.
        log: where it logs to.
        prepare: makes what has to be so in the directory of all this before anybody starts.
        code: a checkout of the commit that runs.
    """
    await asyncio.to_thread(_compile, code)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="npu-bench-")))
        root, plugins, file = directory / "host", directory / "plugins", directory / "config.yaml"
        port, probes = free_port(), free_port()
        specs = simulator.parse_cards(cards)
        simulator.make(root, specs)
        plugins.mkdir()
        if dra:
            config += "allocation: {api: dra}\n"
        at = f"{{listen: '127.0.0.1:{port}', probes: '127.0.0.1:{probes}'}}"
        file.write_text(f"pluginDir: {plugins}\nmetrics: {at}\n{config}", encoding="utf-8")
        if alive:
            stack.enter_context(program(*NPU_AGENT, "simulate", str(root)))
            await until(lambda: simulator.cards(root)[0].telemetry.ticks > 0, interval=POLL)
        stack.enter_context(prepare(directory))
        kubelet = FaultyKubelet(plugins, directory / "pod-resources")
        manager = StandInPluginManager(directory)
        async with node("bench-node", directory) as here:
            await kubelet.start()
            if dra:
                await manager.start()
            try:
                began = time.perf_counter()
                arguments = ("run", "--host-root", str(root), "--config-file", str(file))
                environment = {**image(code), "NODE_NAME": here.node, **here.environment}
                start_one = partial(
                    program,
                    *start,
                    str(here.account),
                    *arguments,
                    environment=environment,
                    log=log,
                    code=code,
                )
                agent = stack.enter_context(start_one())
                if dra:
                    await here.until(lambda found: len(found) == len(specs), DEADLINE)
                else:
                    await _listed(kubelet)
                took = time.perf_counter() - began
                yield Agent(
                    *(agent.popen, kubelet, manager, here, root, plugins, file, port, probes, took),
                    another=start_one,
                )
            finally:
                await manager.stop()
                await kubelet.stop()


def free_port() -> int:
    """One that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
