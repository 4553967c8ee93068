from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from npu_agent.core.state import SessionPhase
from npu_agent.feed import Feed
from npu_agent.kube import Api
from npu_agent.kubelet.ownership import Ownership
from npu_agent.outputs.dra.driver import Driver, Wanted
from tests.outputs.dra.room import DRA, NODE, Room
from tests.until import first

TOO_OLD = "this node's kubelet is v1.30.14, and DRA needs 1.34 or later"
WARBOY = frozenset({"warboy"})


@asynccontextmanager
async def running(room: Room, wanted: Feed[Wanted]) -> AsyncIterator[Driver]:
    """A driver whose kubelet does not come, and whose API server is not there."""
    driver = Driver(
        dra=DRA,
        vendor_families=WARBOY,
        node_name=NODE,
        pod_uid=None,
        kubelet_root=room.directory,
        ownership=Ownership(room.directory),
        keeper=room.keeper,
        snapshots=room.snapshots,
        wanted=wanted,
        api=Api(),
        cdi_root=room.cdi_root,
    )
    task = asyncio.create_task(driver.run())
    try:
        yield driver
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_node_that_cannot_do_dra_is_blocked_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Feed(Wanted(families=WARBOY))
    async with running(Room(tmp_path), wanted) as driver:
        await first(driver.status, lambda now: now.phase is not SessionPhase.NO_CARDS)
        wanted.publish(Wanted(families=WARBOY, impossible=TOO_OLD))
        now = await first(driver.status, lambda now: now.reason == TOO_OLD)
        assert now.phase is SessionPhase.BLOCKED
    (record,) = [one for one in caplog.records if "does not serve" in one.message]
    assert TOO_OLD in str(vars(record))


async def test_also_where_another_agent_serves_so_that_a_rollout_stops(tmp_path: Path) -> None:
    wanted = Feed(Wanted(families=WARBOY))
    other = Ownership(tmp_path)
    async with other.held(lambda _: None), running(Room(tmp_path), wanted) as driver:
        await first(driver.status, lambda now: now.phase is SessionPhase.STANDBY)
        wanted.publish(Wanted(families=WARBOY, impossible=TOO_OLD))
        now = await first(driver.status, lambda now: now.phase is not SessionPhase.STANDBY)
        assert (now.phase, now.reason) == (SessionPhase.BLOCKED, TOO_OLD)


async def test_a_node_that_is_not_asked_to_does_not_say_that_it_cannot(tmp_path: Path) -> None:
    wanted = Feed(Wanted(families=frozenset(), impossible=TOO_OLD))
    async with running(Room(tmp_path), wanted) as driver:
        await asyncio.sleep(0)
        assert driver.status.value.phase is SessionPhase.NO_CARDS
        assert driver.status.value.reason == ""
