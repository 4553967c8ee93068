"""What lasts: parts that fail come back, and nothing grows with restarts and allocations."""

import asyncio
import gc
import logging
import threading
from collections import Counter
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from npu_agent.agent.parts import AgentTiming
from npu_agent.backoff import Backoff
from npu_agent.config.schema import LabelsConfig
from npu_agent.inventory.inventory import Inventory
from npu_agent.kubelet.allocator import Allocator
from npu_agent.outputs.deviceplugin import session
from npu_agent.outputs.deviceplugin.session import Session
from tests.outputs.deviceplugin.client import Client, allocation
from tests.outputs.deviceplugin.helpers import names
from tests.test_agent import DEADLINE, NPU, UUIDS, Node, node
from tests.until import first, until

__all__ = ["node"]

NOWHERE = LabelsConfig(output="none")
"""There is no API server here, and with hurried back-offs it would be asked without end."""


@pytest.fixture
def hurried(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every back-off is short: what is counted is how often, not how long."""
    monkeypatch.setattr(Backoff, "next", lambda self, retry_after=None: 0.001)  # noqa: ARG005
    node.timing = AgentTiming(sessions=session.SessionTiming(socket_check=0.05))


@pytest.mark.parametrize(
    ("part", "cls"),
    [
        ("inventory", Inventory),
        (f"plugin {NPU}", Session),
        ("allocator", Allocator),
    ],
)
@pytest.mark.usefixtures("hurried")
async def test_a_part_that_fails_comes_back_and_takes_no_other_down(
    node: Node,
    part: str,
    cls: type[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It fails while it runs, three times."""
    node.cards("warboy=2")
    run, runs = cls.run, 0

    async def fails(self: Any) -> None:
        nonlocal runs
        runs += 1
        if runs > 3:
            await run(self)
        async with asyncio.timeout(0.2), asyncio.TaskGroup() as both:
            both.create_task(run(self))

    monkeypatch.setattr(cls, "run", fails)
    async with node.agent() as agent:
        await until(lambda: agent.restarts[part] == 3)
        await node.listed(2)
        node.fault("npu0", "dead")
        await node.told(lambda p: p.connected and (UUIDS[0], "Unhealthy") in p.devices)
        assert set(agent.restarts) == {part}
    assert caplog.messages.count("a part of the agent failed; restarting it") == 3


@pytest.fixture
def unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that would count as a leak: pytest keeps log records, the page loads late."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    import_module("npu_agent.outputs.web.page")


def counts() -> Counter[str]:
    """What a leak would make grow: open files, threads, tasks, and objects."""
    gc.collect()
    return Counter(
        files=len(list(Path("/proc/self/fd").iterdir())),
        threads=threading.active_count(),
        tasks=len(asyncio.all_tasks()),
        objects=len(gc.get_objects()),
    )


async def until_back_at(before: Counter[str], spare: int) -> None:
    """Waits until all that is counted is where it was, but for `spare` objects.

    `before` may have been counted while something was just not under way (a look at a card, a
    question to the kubelet): a few tasks, files and threads more are no leak, which would be one
    for each restart, call or page.
    """
    spares = Counter(objects=spare, tasks=5, files=5, threads=5)
    try:
        async with asyncio.timeout(DEADLINE):
            while counts() - before - spares:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"more by {dict(counts() - before)} than {dict(before)}") from None


@pytest.mark.usefixtures("hurried", "unheard")
async def test_memory_and_files_stay_the_same_over_200_kubelet_restarts(node: Node) -> None:
    node.cards("warboy=2")
    async with node.agent(labels=NOWHERE) as agent:
        await first(agent.web.server.listening, bool)
        await node.listed(2)

        async def restart(times: int) -> None:
            for _ in range(times):
                before = node.kubelet.plugins.value[NPU].endpoint
                await node.kubelet.stop()
                await node.kubelet.start()
                await node.told(
                    lambda p, b=before: p.endpoint != b and len(p.healthy()) == 2  # type: ignore[misc]
                )

        await restart(20)  # caches fill
        before = counts()
        await restart(200)
        # Timers that were cancelled stay with asyncio for a while; an endpoint that was not let go
        # would be dozens of objects for each restart.
        await until_back_at(before, spare=1_000)
        assert len([n for n in names(node.plugins) if n.endswith(".sock")]) == 2


@pytest.mark.usefixtures("hurried", "unheard")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("times", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
async def test_memory_and_files_stay_the_same_over_allocations(node: Node, times: int) -> None:
    node.cards("warboy=2")
    async with node.agent(labels=NOWHERE) as agent:
        await first(agent.web.server.listening, bool)
        plugin = await node.listed(2)
        with closing(Client(node.plugins / plugin.endpoint)) as client:
            request = allocation(*UUIDS)

            def allocate(times: int) -> None:
                for _ in range(times):
                    client.call("Allocate", request)

            await asyncio.to_thread(allocate, 200)
            before = counts()
            await asyncio.to_thread(allocate, times)
            await until_back_at(before, spare=499)  # less than one for two calls
