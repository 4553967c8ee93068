"""Attacks that need the agent in its Pod, without capabilities, and a real kubelet: `make chaos`.

The docstrings have two paragraphs, as in tests/chaos/attacks: what is done, and what has to hold.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.node import SOON, Node
from tests.e2e.test_it_keeps_working import agents, entry, serves, well_again

__all__ = ["well_again"]  # a fixture that each test has

pytestmark = [pytest.mark.long, pytest.mark.one_kubelet]


@contextlib.contextmanager
def permitted(path: Path, mode: int) -> Iterator[None]:
    """Other permissions for a while."""
    before = path.stat().st_mode & 0o7777
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


def restarted(node: Node) -> None:
    """The kubelet is restarted, and offers both cards again."""
    node.cluster.stop_kubelet()
    node.cluster.start_kubelet()
    node.wait_allocatable(2)


def test_directory_without_permissions(node: Node) -> None:
    """`chmod 000` on the device-plugins directory for ten seconds, with a Pod that is started.

    The Pod gets its NPU; the agent is not restarted, and registers after the kubelet's restart.
    """
    before = agents(node)
    with permitted(node.cluster.kubelet_dir / "device-plugins", 0):
        node.run("meanwhile", 1)
        time.sleep(10)
    restarted(node)
    assert agents(node) == before


def test_card_without_permissions(node: Node) -> None:
    """`chmod 000` on the driver's folder of a card.

    The other card is handed out meanwhile; the first one is offered again without help.
    """
    before = agents(node)
    with permitted(entry(node, "npu1").resolve(), 0):
        time.sleep(5)
        node.run("meanwhile", 1)
    node.wait_allocatable(2)
    assert agents(node) == before


def test_kubelet_is_killed_again_and_again(node: Node) -> None:
    """The kubelet is killed (SIGKILL) five times, each time as soon as it is up.

    The running Pod keeps its card; the next one gets the other; the agent is not restarted.
    """
    before = agents(node)
    node.run("steady", 1)
    held = node.held()["steady"]
    for _ in range(5):
        node.cluster.kill_kubelet()
        node.cluster.start_kubelet()
    node.wait_allocatable(2)
    node.run("next", 1)
    assert node.held()["steady"] == held
    assert node.held()["next"] != held
    assert agents(node) == before


def test_directory_full_of_others(node: Node) -> None:
    """500 sockets and 2,000 files of others beside the agent's; the kubelet is restarted.

    Registered; the files are as they were.
    """
    directory = node.cluster.kubelet_dir / "device-plugins"
    foreign = [directory / f"furiosa-npu-{number}.txt" for number in range(2000)]
    try:
        for path in foreign:
            path.touch()
        with contextlib.ExitStack() as stack:
            for number in range(500):
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.bind(str(directory / f"f-{number}.sock"))
            restarted(node)
        assert all(path.exists() for path in foreign)
        node.run("next", 2)
    finally:
        for path in foreign:
            path.unlink()


def test_agent_is_stopped_for_good(node: Node) -> None:
    """The agent is stopped (SIGSTOP) and nobody continues it.

    The kubelet's liveness probe restarts it; the running Pod keeps its card, the next one gets the
    other.
    """
    node.run("steady", 1)
    held, ((uid, restarts),) = node.held()["steady"], agents(node)
    stop = node.cluster.command("pkill", "-STOP", "-f", "npu-agent run --config-file=/etc/")
    subprocess.run(stop, check=True)
    node.cluster.wait_for(
        "the agent's container to be restarted",
        lambda: agents(node) == [(uid, restarts + 1)],
        6 * SOON,
    )
    node.cluster.wait_for("it to serve again", lambda: serves(node), SOON)
    node.wait_allocatable(2)
    node.run("next", 1)
    assert node.held()["steady"] == held
    assert node.held()["next"] != held
