import asyncio
import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from npu_agent.feed import Feed
from npu_agent.kubelet.lock import LockByte, LockFile, lock_path
from npu_agent.kubelet.ownership import HAND_OVER, Ownership, Timing
from npu_agent.supervise import background
from tests.until import until

DEADLINE = 20.0
QUICK = Timing(stand_by=0.005, try_every=0.005, settle=0.005)


def ownership(
    directory: Path, lost: Callable[[], None] = lambda: None, timing: Timing = QUICK
) -> Ownership:
    return Ownership(directory, lost, timing)


PROGRAM = """
import asyncio, pathlib, sys
from npu_agent.kubelet.ownership import Ownership

async def main():
    async with Ownership(pathlib.Path(sys.argv[1])).held(lambda owner: None):
        print("mine", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def start(directory: Path) -> subprocess.Popen[str]:
    """Another process that owns the resource."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "mine\n"
    return process


class Second:
    """An agent that comes second; `told` is what it was told while it waited."""

    def __init__(self, directory: Path, timing: Timing = QUICK) -> None:
        self._timing = timing
        self.told: list[str | None] = []
        self.tries = Feed(0)
        self.owns = asyncio.Event()
        self._directory = directory

    async def waited(self, tries: int = 1) -> None:
        async for tried in self.tries.watch():
            if tried >= tries:
                return

    async def run(self) -> None:
        def waiting(owner: str | None) -> None:
            self.told.append(owner)
            self.tries.publish(len(self.told))

        async with ownership(self._directory, timing=self._timing).held(waiting):
            self.owns.set()
            await asyncio.Event().wait()


def nobody(owner: str | None) -> None:
    assert owner is None


async def test_a_second_agent_waits_learns_the_owner_and_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    second = Second(tmp_path)
    async with asyncio.timeout(DEADLINE):
        async with ownership(tmp_path).held(nobody) as still_ours:
            assert still_ours()
            running = asyncio.create_task(second.run())
            await second.waited(5)
            assert not second.owns.is_set()
        await second.owns.wait()
    who = json.loads(lock_path(tmp_path).read_text(encoding="utf-8"))
    owner = f"npu-agent {who['version']} on {who['host']}, pid {who['pid']}"
    assert str(second.told[0]).startswith(owner)
    assert set(second.told[:-1]) == {second.told[0]}
    assert second.told[-1] is None
    said = [record.message for record in caplog.records]
    assert said == ["another agent serves this node; waiting for it to end", "taking over"]
    running.cancel()


async def test_a_waiting_session_does_not_keep_a_lost_lock(
    tmp_path: Path,
) -> None:
    lost = Mock()
    ours = ownership(tmp_path, lost)
    waits = asyncio.Event()
    async with ours.held(nobody) as still_ours:
        lock_path(tmp_path).unlink()
        assert not still_ours()
        async with ownership(tmp_path).held(nobody) as newer:

            async def second() -> None:
                async with ours.held(lambda _: waits.set()):
                    pass

            session = asyncio.create_task(second())
            await waits.wait()
            assert newer()
            assert not still_ours()
            lost.assert_not_called()
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)
    lost.assert_called()


async def test_a_session_that_ends_late_does_not_lose_the_lock_that_was_taken_again(
    tmp_path: Path,
) -> None:
    lost = Mock()
    ours = ownership(tmp_path, lost)
    async with contextlib.AsyncExitStack() as late:
        await late.enter_async_context(ours.held(nobody))
        async with ours.held(nobody):
            lock_path(tmp_path).unlink()
        lost.assert_called_once_with()
        async with ours.held(nobody) as again:
            await late.aclose()
            assert again()
            lost.assert_called_once_with()


async def test_sessions_of_one_agent_share_it_and_nothing_is_left_when_the_last_one_ends(
    tmp_path: Path,
) -> None:
    ours, second = ownership(tmp_path), Second(tmp_path)
    async with asyncio.timeout(DEADLINE):
        async with ours.held(nobody):
            async with ours.held(nobody) as still_ours:
                running = asyncio.create_task(second.run())
                await second.waited()
            assert still_ours()
            await second.waited(len(second.told) + 3)
            assert not second.owns.is_set()
        # Who waits does not own the file that the first one took away with it, but a new one.
        await second.owns.wait()
        assert lock_path(tmp_path).exists()
        third = Second(tmp_path)
        async with background(third.run()):  # who only waited leaves the owner's alone
            await third.waited()
        assert lock_path(tmp_path).exists()
        running.cancel()
        await asyncio.wait([running])
    assert list(tmp_path.iterdir()) == []


async def test_a_full_disk_keeps_no_agent_from_owning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    second = Second(tmp_path)
    async with asyncio.timeout(DEADLINE):
        async with ownership(tmp_path).held(nobody) as still_ours:
            assert still_ours()
            running = asyncio.create_task(second.run())
            await second.waited()
        await second.owns.wait()
    assert second.told[0] == "an agent that has not signed its lock"
    running.cancel()


async def test_an_owner_that_ends_goes_on_until_the_next_one_is_registered(tmp_path: Path) -> None:
    ours, theirs = ownership(tmp_path), ownership(tmp_path)
    registers, registered, owns = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def register() -> None:
        registers.set()
        await registered.wait()

    async def second() -> None:
        async with theirs.held(lambda _: None, register):
            owns.set()
            await asyncio.Event().wait()

    async def without_registration() -> None:
        async with theirs.held(lambda _: None):
            await asyncio.Event().wait()

    async with asyncio.timeout(DEADLINE):
        async with ours.held(nobody):
            tasks = [asyncio.create_task(each()) for each in (second, without_registration)]
            await waited_for(tmp_path)
            assert not registers.is_set()  # an owner that does not end may stay for ever
            handing = asyncio.create_task(ours.hand_over())
            await registers.wait()
            assert not (await asyncio.wait([handing], timeout=0.05))[0]
            registered.set()
            await handing
            assert not owns.is_set()
        await owns.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def waited_for(directory: Path) -> None:
    """Another agent waits for the lock."""
    lock = LockFile(directory)
    lock.open_current()
    await until(lambda: lock.is_byte_locked(LockByte.REGISTERS))


async def test_an_owner_ends_without_a_wait_if_no_agent_stands_by(tmp_path: Path) -> None:
    ours, second = ownership(tmp_path), Second(tmp_path)
    await ours.hand_over()
    async with asyncio.timeout(HAND_OVER / 2), ours.held(nobody):
        await ours.hand_over()
        assert json.loads(lock_path(tmp_path).read_text(encoding="utf-8"))["ends"] is False
        async with background(second.run()):
            await waited_for(tmp_path)
        await ours.hand_over()


async def test_an_owner_does_not_wait_for_ever(tmp_path: Path) -> None:
    ours = ownership(tmp_path, timing=replace(QUICK, hand_over=0.05))
    theirs = ownership(tmp_path)

    async def second() -> None:
        async with theirs.held(lambda _: None, asyncio.Event().wait):  # type: ignore[arg-type]
            pass

    async with asyncio.timeout(DEADLINE), ours.held(nobody), background(second()):
        await waited_for(tmp_path)
        await ours.hand_over()


async def test_only_the_next_of_several_registers_and_it_takes_over(tmp_path: Path) -> None:
    """Two that are registered would take claims from each other."""
    ours, registered, owns = ownership(tmp_path), list[int](), list[int]()

    async def wait(number: int) -> None:
        async def register() -> None:
            registered.append(number)

        async with ownership(tmp_path).held(lambda _: None, register):
            owns.append(number)
            await asyncio.Event().wait()

    async with asyncio.timeout(DEADLINE):
        async with ours.held(nobody):
            tasks = [asyncio.create_task(wait(0))]
            await waited_for(tmp_path)
            tasks += [asyncio.create_task(wait(number)) for number in (1, 2, 3)]
            await asyncio.sleep(3 * QUICK.try_every)
            await ours.hand_over()
        await until(lambda: owns)
        assert registered == owns == [0]
        tasks.pop(0).cancel()  # killed, or without an end in order
        await until(lambda: len(owns) == 2)
        assert registered == [0]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("killed", [True, False])
async def test_a_third_agent_takes_over_if_the_next_in_line_hangs(
    tmp_path: Path, killed: bool
) -> None:
    impatient = Second(tmp_path, replace(QUICK, free=0.0))
    owner = start(tmp_path)
    try:
        hangs = LockFile(tmp_path)
        hangs.open_current()
        assert hangs.lock_byte(LockByte.NEXT)  # and does nothing more
        running = asyncio.create_task(impatient.run())
        async with asyncio.timeout(DEADLINE):
            await impatient.waited(5)
            assert not impatient.owns.is_set()
            if not killed:  # an owner that ends in order takes the file with it
                lock_path(tmp_path).unlink()
            owner.kill()
            await impatient.owns.wait()
        running.cancel()
        await asyncio.wait([running])
        hangs.close()
    finally:
        owner.kill()
        owner.communicate()
