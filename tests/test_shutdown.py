"""The agent as a process, which ends at SIGTERM whatever hangs."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from npu_agent.kubelet.record import RECORD
from npu_agent.people import simulator
from npu_agent.people.simulator.kubelet import StandInKubelet
from tests.kube.helpers import kubeconfig
from tests.outputs.deviceplugin.helpers import short_directory
from tests.processes import environment
from tests.until import until

NPU = "beta.furiosa.ai/npu"
LONG = 12.0
"""Seconds: far more than an end takes, and less than what hangs would have taken (16 s, or for
ever)."""

LOOP_HANGS = """
import signal, time
def hang(*_):
    open({hangs!r}, "w").close()
    time.sleep(1000)
signal.signal(signal.SIGUSR1, hang)
"""


class Node:
    """A simulated tree with a card, a kubelet's stand-in, and room for what an agent needs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plugins = directory / "plugins"
        self.plugins.mkdir()
        self.root = directory / "host"
        simulator.make(self.root, simulator.parse_cards("warboy=1"), plain_nodes=True)

    @contextmanager
    def kubelet(self) -> Iterator[subprocess.Popen[str]]:
        """The stand-in as a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-c", KUBELET, self.plugins, self.directory / "pod-resources"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    @contextmanager
    def agent(self, mount: int | None = None, **env: str) -> Iterator[subprocess.Popen[str]]:
        """`mount` is a descriptor that leads to the kubelet's directory, as a mount does."""
        plugins = self.plugins if mount is None else f"/proc/self/fd/{mount}"
        where = ("--host-root", self.root, "--plugin-dir", plugins)
        quick = ("--health-interval=0.05", "--metrics-listen=127.0.0.1:0")
        process = subprocess.Popen(
            [sys.executable, "-m", "npu_agent", "run", *where, *quick],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(env),
            pass_fds=() if mount is None else (mount,),
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    with short_directory() as directory:
        yield Node(directory)


@pytest.fixture
async def kubelet(node: Node) -> AsyncIterator[StandInKubelet]:
    one = StandInKubelet(node.plugins, node.directory / "pod-resources")
    await one.start()
    yield one
    await one.stop()


async def registered(kubelet: StandInKubelet) -> None:
    await kubelet.until(NPU, lambda plugin: plugin.messages > 0, 30.0)


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Sends SIGTERM; returns the exit code and the log."""
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.to_thread(process.communicate, timeout=LONG)
    return process.returncode, log


async def test_a_directory_that_was_deleted_under_its_mount_ends_it(node: Node) -> None:
    mount = os.open(node.plugins, os.O_PATH)
    try:
        with node.agent(mount) as agent:
            await until((node.plugins / RECORD).exists)
            shutil.rmtree(node.plugins)
            node.plugins.mkdir()
            _, log = await asyncio.to_thread(agent.communicate, timeout=LONG)
    finally:
        os.close(mount)
    assert agent.returncode == 1
    assert "a directory of the kubelet was deleted: exiting, because" in log
    assert f"directory=/proc/self/fd/{mount}" in log


async def test_with_a_token_that_blocks(node: Node, kubelet: StandInKubelet) -> None:
    """A named pipe that is never written to, as a file on a mount that hangs."""
    os.mkfifo(node.directory / "token")
    config = kubeconfig(node.directory, "https://127.0.0.1:1", user={"tokenFile": "token"})
    with node.agent(KUBECONFIG=str(config), NODE_NAME="n1") as agent:
        await registered(kubelet)
        with (node.directory / "token").open("w"):  # returns once the agent reads
            assert (await ended(agent))[0] == 0


KUBELET = """
import asyncio, pathlib, sys
from npu_agent.people.simulator.kubelet import StandInKubelet

async def main():
    kubelet = StandInKubelet(*map(pathlib.Path, sys.argv[1:]))
    await kubelet.start()
    await kubelet.until("beta.furiosa.ai/npu", lambda plugin: plugin.messages > 0, 60.0)
    print("registered", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_with_a_kubelet_that_is_stopped(node: Node) -> None:
    with node.kubelet() as kubelet, node.agent() as agent:
        assert kubelet.stdout
        assert await asyncio.to_thread(kubelet.stdout.readline) == "registered\n"
        kubelet.send_signal(signal.SIGSTOP)
        code, log = await ended(agent)
    assert (code, "ended" in log) == (0, True)


async def test_with_an_event_loop_that_hangs(node: Node, kubelet: StandInKubelet) -> None:
    """In a call of the system that does not return."""
    hangs = node.directory / "hangs"
    (node.directory / "sitecustomize.py").write_text(LOOP_HANGS.format(hangs=str(hangs)))
    path = f"{node.directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with node.agent(PYTHONPATH=path) as agent:
        await registered(kubelet)
        agent.send_signal(signal.SIGUSR1)
        await until(hangs.exists)
        code, log = await ended(agent)
    assert (code, "exited without waiting for a hung task" in log) == (1, True)


async def test_with_a_log_that_nobody_reads(node: Node, kubelet: StandInKubelet) -> None:
    with node.agent() as agent:
        await registered(kubelet)
        assert agent.stderr
        # Through /proc it is another description of the same pipe, which may not block here.
        full = os.open(f"/proc/{agent.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        try:
            assert _is_full(full)
            agent.send_signal(signal.SIGTERM)  # which it logs
            assert await asyncio.to_thread(agent.wait, LONG) == 0
        finally:
            os.close(full)


def _is_full(descriptor: int) -> bool:
    try:
        while True:
            os.write(descriptor, b"-" * 512)
    except BlockingIOError:
        return True


async def test_before_it_has_begun(node: Node) -> None:
    with node.agent() as agent:
        await until(lambda: _signals(agent.pid))
        code, _ = await ended(agent)
        assert code == 0


def _signals(pid: int) -> bool:
    """Whether the process takes care of its signals: SIGTERM is blocked (proc(5))."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            return bool(int(line.split()[1], 16) & 1 << (signal.SIGTERM - 1))
    return False
