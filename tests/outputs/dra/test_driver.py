"""The driver part between stand-ins for the kubelet's plugin manager and the API server."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from npu_agent import files
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment, Ledger
from npu_agent.core.plan import DraWishes, PluginWishes
from npu_agent.core.state import SessionPhase
from npu_agent.feed import Feed
from npu_agent.kubelet.allocator import Allocator
from npu_agent.kubelet.ownership import Ownership
from npu_agent.kubelet.podresources import Holdings
from npu_agent.kubelet.record import read_record, recover
from npu_agent.outputs.dra.driver import Driver, DriverHost, DriverTiming
from npu_agent.outputs.dra.service import REGISTRY
from npu_agent.people.simulator.apiserver import SLICES
from npu_agent.people.simulator.pluginmanager import StandInPluginManager
from tests.kube.apiserver import FaultyApiServer
from tests.outputs.deviceplugin.helpers import resources
from tests.outputs.dra.api import NODE, cluster
from tests.outputs.dra.cards import card
from tests.outputs.dra.helpers import kubelet_root
from tests.outputs.dra.room import NPU
from tests.outputs.helpers import Kubelet, allocator_of, claim
from tests.until import first, until

FAMILY = frozenset({"rngd"})


@dataclass
class World:
    root: Path
    server: FaultyApiServer
    driver: Driver
    allocator: Allocator
    kubelet: Kubelet
    snapshots: Feed[Snapshot]
    wishes: Feed[DraWishes]
    manager: StandInPluginManager
    task: asyncio.Task[None]

    async def phase(self, phase: SessionPhase) -> str:
        return (await first(self.driver.status, lambda now: now.phase is phase)).reason

    def sockets(self) -> int:
        return len(list(self.root.glob("plugins*/**/*.sock")))


@asynccontextmanager
async def world(tmp_path: Path, families: frozenset[str] = FAMILY) -> AsyncIterator[World]:
    async with cluster(tmp_path) as (server, api), kubelet_root() as root:
        directory = root / "device-plugins"
        directory.mkdir()
        snapshots = Feed(Snapshot((card("rngd", 0),), complete=True))
        kubelet = Kubelet(recover(Ledger(), read_record(directory), 0.0))

        def ask() -> None:
            kubelet.holdings.publish(Holdings(asked_at=asyncio.get_running_loop().time()))

        kubelet.ask = ask  # type: ignore[method-assign]
        wishes = Feed(DraWishes(families=families))
        allocator = allocator_of(
            kubelet,
            snapshots,
            directory,
            Feed(PluginWishes(resources(NPU, None), frozenset(), ())),
            wishes,
        )
        driver = Driver(
            allocator.pool,
            DriverHost(node_name=NODE, kubelet_root=root, cdi_root=root / "cdi"),
            allocator,
            Ownership(directory),
            api,
            DriverTiming(linger=1.0),
        )
        manager = StandInPluginManager(root)
        await manager.start()
        tasks = [asyncio.create_task(run()) for run in (driver.run, allocator.run)]
        try:
            yield World(
                root, server, driver, allocator, kubelet, snapshots, wishes, manager, tasks[0]
            )
        finally:
            await manager.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_driver_whose_registration_is_lost_is_registered_again(tmp_path: Path) -> None:
    """The kubelet was restarted, or a socket removed."""
    async with world(tmp_path) as here:
        await here.phase(SessionPhase.REGISTERED)
        await until(here.server.devices)
        await here.manager.stop()
        assert "closed its stream" in await here.phase(SessionPhase.REGISTERING)
        here.server.delete()  # as a kubelet does when it starts
        await here.manager.start()
        await here.phase(SessionPhase.REGISTERED)
        await until(here.server.devices)
        assert here.sockets() == 2
        for path in here.root.glob("plugins_registry/*.sock"):
            path.unlink()
        assert "socket was removed" in await here.phase(SessionPhase.BLOCKED)
        await here.phase(SessionPhase.REGISTERED)


async def test_a_driver_stands_by_while_another_agent_serves(tmp_path: Path) -> None:
    """The kubelet may say who holds what before the record is ours: that is no failure."""
    async with world(tmp_path) as here:
        async with Ownership(here.root / "device-plugins").held(lambda _: None):
            reason = await here.phase(SessionPhase.STANDBY)
            assert reason.startswith("served by npu-agent ")
            assert not here.sockets()
            here.kubelet.ask()
            here.allocator.reconcile()
            await here.allocator.asked.until(bool)
            for _ in range(10):  # turns of the loop, for what would be a failure to be one
                await asyncio.sleep(0)
        phases = []
        async for now in here.driver.status.watch():
            phases.append(now.phase)
            if now.phase is SessionPhase.REGISTERED:
                break
        assert SessionPhase.BLOCKED not in phases
        assert not now.reason
        await until(here.server.devices)


async def test_a_failure_is_tried_again_in_the_same_part(tmp_path: Path) -> None:
    """Not by its end: the pool and the claims go on meanwhile."""
    async with world(tmp_path) as here:
        (here.root / REGISTRY).rmdir()
        assert REGISTRY in await here.phase(SessionPhase.BLOCKED)
        await until(here.server.devices)
        here.snapshots.publish(Snapshot((card("rngd", 0), card("rngd", 1)), complete=True))
        await until(lambda: len(here.server.devices()) == 2)
        assert here.driver.status.value.phase is SessionPhase.BLOCKED
        (here.root / REGISTRY).mkdir()
        await here.phase(SessionPhase.REGISTERED)
        assert not here.task.done()


async def test_a_prepared_claim_is_served_although_its_card_is_gone(tmp_path: Path) -> None:
    """Else its Pod would stay Terminating."""
    async with world(tmp_path) as here:
        await until(here.server.devices)
        await here.allocator.prepare(claim("c", *here.snapshots.value.cards), ())
        here.wishes.publish(DraWishes(families=frozenset()))
        here.snapshots.publish(Snapshot((), complete=True))
        await until(lambda: not here.allocator.published.value)
        assert here.driver.needed
        await here.allocator.unprepare("uid-c")
        await here.phase(SessionPhase.NO_CARDS)


async def test_the_pool_follows_the_holders(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await until(here.server.devices)
        assert not here.server.taints()
        (state,) = here.snapshots.value.cards
        held = Assignment("team", "train", "main", NPU, state.id)
        now = asyncio.get_running_loop().time()
        here.kubelet.holdings.publish(Holdings(assignments=(held,), asked_at=now))
        here.allocator.reconcile()
        await until(lambda: "npu.furiosa.ai/held" in str(here.server.taints()))


async def test_a_driver_without_a_duty_serves_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, frozenset()) as here:
        assert here.sockets() == 0
        here.wishes.publish(DraWishes(families=FAMILY))
        await until(lambda: here.sockets() == 2)
        here.wishes.publish(DraWishes(families=frozenset()))
        await here.phase(SessionPhase.NO_CARDS)
        assert here.sockets() == 0


async def test_no_pool_without_its_cards_is_offered_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cards that no record names the slices of an agent before this one may have all."""
    full = AsyncMock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    replace = files.replace
    monkeypatch.setattr(files, "replace", full)
    async with world(tmp_path) as here:
        await until(lambda: here.manager.instances.value)  # for claims that are to be unprepared
        assert os.strerror(errno.ENOSPC) in await here.phase(SessionPhase.BLOCKED)
        here.kubelet.ask()
        await until(lambda: full.call_count > 1)
        assert here.driver.pool.offered.value is None
        monkeypatch.setattr(files, "replace", replace)
        here.kubelet.ask()
        await until(here.server.devices)
        assert all(event["object"]["spec"]["devices"] for _, event in here.server.events[SLICES])
        await here.phase(SessionPhase.REGISTERED)
