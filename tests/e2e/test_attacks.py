"""Attacks that need the agent in its Pod, without capabilities, and a real kubelet: `make chaos`.

The docstrings have two paragraphs, as in tests/chaos/attacks: what is done, and what has to hold.
"""

from __future__ import annotations

import contextlib
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


def test_agent_is_stopped_for_good(node: Node) -> None:
    """The agent is stopped (SIGSTOP), and not continued.

    The kubelet's liveness probe restarts it; the running Pod keeps its card, the next one gets the
    other.
    """
    with keeps_its_card(node, agent_stays=False):
        before = node.agent_run()
        node.signal_agent("STOP")
        node.wait_restarted(before, 6 * SOON)
        node.wait_for("it to serve again", node.serves)
