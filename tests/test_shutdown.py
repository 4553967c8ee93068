"""The agent as a process, which ends at SIGTERM whatever hangs."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from npu_agent.kubelet.record import RECORD
from tests.kube.helpers import kubeconfig
from tests.processes import started
from tests.test_agent import Node, node
from tests.until import until

__all__ = ["node"]

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


@contextmanager
def agent(node: Node, *descriptors: int, **env: Any) -> Iterator[subprocess.Popen[str]]:
    """The agent of a node with one card; it inherits these descriptors."""
    node.cards("warboy=1")
    with started(*node.arguments, descriptors=descriptors, **env) as process:
        yield process.popen


async def registered(node: Node) -> None:
    await node.told(lambda plugin: plugin.messages > 0)


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Sends SIGTERM; returns the exit code and the log."""
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.to_thread(process.communicate, timeout=LONG)
    return process.returncode, log


def _removed(directory: Path) -> bool:
    """Deletes a directory; returns whether it is gone: the agent may have made a file meanwhile."""
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


async def test_a_directory_that_was_deleted_under_its_mount_ends_it(node: Node) -> None:
    mount = os.open(node.plugins, os.O_PATH)
    mounted = replace(node, plugins=Path(f"/proc/self/fd/{mount}"))
    try:
        with agent(mounted, mount) as process:
            await until((node.plugins / RECORD).exists)
            await until(partial(_removed, node.plugins))
            node.plugins.mkdir()
            _, log = await asyncio.to_thread(process.communicate, timeout=LONG)
    finally:
        os.close(mount)
    assert process.returncode == 1
    assert "a directory of the kubelet was deleted: exiting, because" in log
    assert f"directory=/proc/self/fd/{mount}" in log


async def test_with_a_token_that_blocks(node: Node) -> None:
    """A named pipe that is never written to, as a file on a mount that hangs."""
    directory = node.plugins.parent
    os.mkfifo(directory / "token")
    config = kubeconfig(directory, "https://127.0.0.1:1", user={"tokenFile": "token"})
    with agent(node, KUBECONFIG=str(config), NODE_NAME="n1") as process:
        await registered(node)
        with (directory / "token").open("w", encoding="utf-8"):  # returns once the agent reads
            assert (await ended(process))[0] == 0


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
    await node.kubelet.stop()
    directories = node.plugins, node.plugins.parent / "pod-resources"
    kubelet = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KUBELET, *directories, stdout=subprocess.PIPE
    )
    try:
        with agent(node) as process:
            assert kubelet.stdout
            assert await kubelet.stdout.readline() == b"registered\n"
            kubelet.send_signal(signal.SIGSTOP)
            code, log = await ended(process)
    finally:
        kubelet.kill()
        await kubelet.wait()
    assert (code, "ended" in log) == (0, True)


async def test_with_an_event_loop_that_hangs(node: Node) -> None:
    """In a call of the system that does not return."""
    directory = node.plugins.parent
    hangs = directory / "hangs"
    (directory / "sitecustomize.py").write_text(
        LOOP_HANGS.format(hangs=str(hangs)), encoding="utf-8"
    )
    path = f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with agent(node, PYTHONPATH=path) as process:
        await registered(node)
        process.send_signal(signal.SIGUSR1)
        await until(hangs.exists)
        code, log = await ended(process)
    assert (code, "exited without waiting for a hung task" in log) == (1, True)


HANGS_AT_THE_END = """
import asyncio, os, signal, time
from npu_agent.shutdown import Shutdown
shutdown = Shutdown()
async def main():
    received = asyncio.Event()
    shutdown.begin(lambda _: received.set())
    os.kill(os.getpid(), signal.SIGTERM)
    await received.wait()
    shutdown.allow(1000)  # calls under way
    await asyncio.sleep(2.5)  # the thread has seen that
    shutdown.allow(0.1)
    time.sleep(1000)
asyncio.run(main())
"""


async def test_a_shorter_time_for_the_end_is_kept() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HANGS_AT_THE_END)
    async with asyncio.timeout(30):
        assert await process.wait() == 1


async def test_before_it_has_begun(node: Node) -> None:
    with agent(node) as process:
        await until(lambda: _signals(process.pid))
        code, _ = await ended(process)
        assert code == 0


def _signals(pid: int) -> bool:
    """Whether the process takes care of its signals: SIGTERM is blocked (proc(5))."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("SigBlk:"):
            return bool(int(line.split()[1], 16) & 1 << (signal.SIGTERM - 1))
    return False
