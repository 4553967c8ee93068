"""Attacks that need the agent in its Pod, without capabilities, and a real kubelet: `make chaos`.

The docstrings have two paragraphs, as in tests/chaos/attacks: what is done, and what has to hold.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.node import SOON, Node
from tests.e2e.test_it_keeps_working import entry, keeps_its_card

pytestmark = [
    pytest.mark.long,
    pytest.mark.one_kubelet,
    pytest.mark.usefixtures("repaired"),
]


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
    before = node.agent_run()
    with permitted(node.cluster.kubelet_dir / "device-plugins", 0):
        node.run("meanwhile", 1)
        time.sleep(10)
    restarted(node)
    assert node.agent_run() == before


def test_card_without_permissions(node: Node) -> None:
    """`chmod 000` on the driver's folder of a card.

    The other card is handed out meanwhile; the first one is offered again without help.
    """
    before = node.agent_run()
    with permitted(entry(node, "npu1").resolve(), 0):
        time.sleep(5)
        node.run("meanwhile", 1)
    node.wait_allocatable(2)
    assert node.agent_run() == before


def test_kubelet_is_killed_again_and_again(node: Node) -> None:
    """The kubelet is killed (SIGKILL) five times, each time as soon as it is up.

    The running Pod keeps its card; the next one gets the other; the agent is not restarted.
    """
    with keeps_its_card(node):
        for _ in range(5):
            node.cluster.kill_kubelet()
            node.cluster.start_kubelet()


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
    """The agent is stopped (SIGSTOP), and not continued.

    The kubelet's liveness probe restarts it; the running Pod keeps its card, the next one gets the
    other.
    """
    node.run("steady", 1)
    held, before = node.held()["steady"], node.agent_run()
    node.signal_agent("STOP")
    node.wait_restarted(before, 6 * SOON)
    node.wait_for("it to serve again", node.serves)
    node.wait_allocatable(2)
    node.run("next", 1)
    assert node.held()["steady"] == held
    assert node.held()["next"] != held
