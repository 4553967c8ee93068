"""Faults between the agent and the kubelet, each played with the stand-in for the kubelet."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from npu_agent.backoff import Backoff
from npu_agent.core.state import SessionPhase, SessionStatus
from npu_agent.feed import Feed
from npu_agent.kubelet import ownership
from npu_agent.kubelet.lock import lock_path
from npu_agent.kubelet.ownership import Ownership
from npu_agent.kubelet.registration import RegistrationTracker
from npu_agent.kubelet.rpc import UnixServer
from npu_agent.outputs.deviceplugin import session
from npu_agent.outputs.deviceplugin.service import Devices
from npu_agent.outputs.deviceplugin.session import Plugin, Session, SessionTiming
from npu_agent.people.simulator.kubelet import ListedPlugin as KnownPlugin
from tests.kubelet.kubelet import FaultyKubelet
from tests.outputs.deviceplugin.allocator import StandInAllocator
from tests.outputs.deviceplugin.helpers import devices, names, short_directory, state
from tests.until import first, until

RESOURCE = "beta.furiosa.ai/npu"
DEADLINE = 20.0
"""Seconds; guards against hanging and measures nothing."""
CARDS = devices(state(index=0, id_="UUID-A"), state(index=1, id_="UUID-B"))
QUICK = SessionTiming(
    register=DEADLINE,
    connect=DEADLINE,
    socket_check=0.01,
    verify_interval=0.02,
    verify_confirm=0.01,
    retry_first=0.005,
    retry_longest=0.02,
    flap_backoff_max=0.1,
)
"""Pauses are short, deadlines are not: a test that waits for one to pass makes it short itself."""


@dataclass
class Room:
    """A plugin directory, a kubelet that can misbehave, and what to serve."""

    directory: Path
    kubelet: FaultyKubelet
    devices: Feed[Devices] = field(default_factory=lambda: Feed(CARDS))
    one: Session | None = None
    timing: SessionTiming = QUICK
    settle: float = 0.02

    def __post_init__(self) -> None:
        self.allocator = StandInAllocator(self.devices)
        self.asked = self.allocator.kubelet

    async def more_asks(self, count: int) -> None:
        """Waits until the kubelet was asked so many times more what it offers."""
        wanted = self.asked.asks + count
        await until(lambda: self.asked.asks >= wanted)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Session]:
        one = self.one = Session(
            Plugin(resource=RESOURCE, directory=self.directory, socket_name="npu"),
            self.allocator,
            Ownership(self.directory, timing=ownership.Timing(try_every=0.005, settle=self.settle)),
            self.timing,
        )
        task = asyncio.create_task(one.run())
        try:
            yield one
            assert not task.done()
            # Else a deadline that passes later would be taken for the end (supervise.py). One that
            # passes at this very moment takes its mark back by itself.
            await until(lambda: not task.cancelling())
        finally:
            await ended(task)

    async def told(self, condition: Callable[[KnownPlugin], bool] = bool) -> KnownPlugin:
        """Waits until what the kubelet knows of the resource meets the condition."""
        return await self.kubelet.until(RESOURCE, condition, DEADLINE)

    async def registered(self, after: str = "") -> KnownPlugin:
        """Waits until the kubelet has a list, from another socket than `after`, and we know it."""
        plugin = await self.told(lambda p: p.connected and p.messages > 0 and p.endpoint != after)
        if self.one:
            await first(self.one.status, lambda s: s.phase is SessionPhase.REGISTERED)
        return plugin


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    with short_directory() as temporary:
        directory = temporary / "plugins"
        directory.mkdir()
        kubelet = FaultyKubelet(directory)
        await kubelet.start()
        yield Room(directory, kubelet)
        await kubelet.stop()


@pytest.fixture
def unhurried(room: Room) -> None:
    """For tests that count registrations: the kubelet has time to put the old stream away.

    It lets go of whichever registration it has when a stream ends (`runClient`).
    """
    room.timing = replace(QUICK, retry_first=0.3, flap_backoff_max=0.3)
    room.settle = 0.3


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The log lines so far, with their reason."""
    caplog.set_level(logging.INFO, "npu_agent")

    def lines() -> list[str]:
        records = [record for record in caplog.records if record.name.startswith("npu_agent")]
        reasons = [record.__dict__["fields"].get("reason") for record in records]
        return [
            f"{record.message}: {reason}" if reason else record.message
            for record, reason in zip(records, reasons, strict=True)
        ]

    return lines


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    async with asyncio.timeout(DEADLINE):
        await asyncio.wait([task])


class Tries:
    """Counts the calls of a method, so that a test can wait for a number of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        self._count = 0
        real = getattr(owner, method)

        def counted(*args: object) -> object:
            self._count += 1
            return real(*args)

        monkeypatch.setattr(owner, method, counted)

    async def more(self, number: int) -> None:
        wanted = self._count + number
        await until(lambda: self._count >= wanted)


async def test_the_devices_are_listed_and_after_a_change_once_more(
    room: Room, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    looks = Tries(monkeypatch, UnixServer, "exists")
    async with room.running() as one:
        plugin = await room.registered()
        assert plugin.devices == (("UUID-A", "Healthy"), ("UUID-B", "Healthy"))
        assert plugin.endpoint in names(room.directory)
        assert replace(one.status.value, since=None) == SessionStatus(
            resource=RESOURCE, phase=SessionPhase.REGISTERED, registrations=1
        )
        assert said() == ["registered"]
        room.devices.publish((replace(CARDS[0], healthy=False, reason="dead"), CARDS[1]))
        plugin = await room.told(lambda p: p.messages == 2)
        assert plugin.devices == (("UUID-A", "Unhealthy"), ("UUID-B", "Healthy"))
        room.devices.publish(())
        assert not (await room.told(lambda p: p.messages == 3)).devices
        await looks.more(5)
        assert (await room.told()).messages == 3
        assert (room.kubelet.calls, one.status.value.registrations) == (1, 1)
        assert one.counts.messages == 3


async def test_end_is_in_order(room: Room) -> None:
    (room.directory / "kubelet_internal_checkpoint").write_text("{}", encoding="utf-8")
    tasks = asyncio.all_tasks()
    async with room.running() as one:
        plugin = await room.registered()
    assert one.status.value.phase is SessionPhase.ENDED
    assert not (await room.told(lambda p: not p.connected)).healthy()
    assert plugin.endpoint not in names(room.directory)
    assert names(room.directory) == ["kubelet.sock", "kubelet_internal_checkpoint"]
    await room.kubelet.stop()
    await until(lambda: not asyncio.all_tasks() - tasks)


async def test_a_socket_without_a_listener(room: Room) -> None:
    await room.kubelet.stop()
    with socket.socket(socket.AF_UNIX) as left_behind:  # by a kubelet that was killed
        left_behind.bind(str(room.directory / "kubelet.sock"))
    async with room.running() as one:
        status = await first(one.status, lambda s: bool(s.reason))
        assert "the kubelet does not answer: " in status.reason
        assert "Connection refused" in status.reason
        await room.kubelet.start()
        await room.registered()


async def test_kubelet_restarts(room: Room, said: Callable[[], list[str]]) -> None:
    async with room.running() as one:
        before = await room.registered()
        await room.kubelet.stop()
        await room.kubelet.start()  # which sweeps every socket
        after = await room.registered(after=before.endpoint)
        assert len(after.healthy()) == 2
        assert before.endpoint not in names(room.directory)
        # More than twice where the kubelet is slow to put the old stream away (`runClient`).
        await first(
            one.status, lambda s: s.phase is SessionPhase.REGISTERED and s.registrations >= 2
        )
        assert said()[:2] == ["registered", "lost the kubelet; registering again: its stream ended"]
        assert said()[-1] == "registered"


@pytest.mark.usefixtures("unhurried")
async def test_own_socket_is_removed(
    room: Room, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    looks = Tries(monkeypatch, UnixServer, "exists")
    async with room.running() as one:
        before = await room.registered()
        assert (one.counts.returns, room.allocator.losses) == (0, 0)
        (room.directory / before.endpoint).unlink()
        after = await room.registered(after=before.endpoint)
        assert after.endpoint in names(room.directory)
        assert (one.counts.returns, room.allocator.losses) == (1, 1)
        # The stream of the socket before had ended in time.
        await looks.more(5)
        assert room.kubelet.calls == 2
        assert said() == [
            "registered",
            "lost the kubelet; registering again: our socket was removed",
            "registered",
        ]


async def test_directory_is_wiped(room: Room) -> None:
    async with room.running():
        before = await room.registered()
        lock = lock_path(room.directory)
        lock.unlink()
        (room.directory / before.endpoint).unlink()
        await room.registered(after=before.endpoint)
        assert lock.name in names(room.directory)


async def test_register_is_refused(
    room: Room, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    tries = Tries(monkeypatch, Session, "_register")
    room.kubelet.refusal = "the ResourceName is invalid"
    async with room.running() as one:
        await tries.more(5)
        reason = "the kubelet refuses: UNKNOWN: the ResourceName is invalid"
        assert one.status.value.reason == reason
        assert said() == [f"not registered; retrying: {reason}"]
        room.kubelet.refusal = ""
        await room.registered()
        assert said()[1:] == ["registered"]


async def test_end_while_register_is_not_answered(room: Room) -> None:
    room.kubelet.answers = False
    async with room.running() as one:
        await until(lambda: room.kubelet.calls)
    assert one.status.value.phase is SessionPhase.ENDED
    assert not [name for name in names(room.directory) if name.startswith("npu-")]


@pytest.mark.parametrize(
    ("what", "within", "reason"),
    [
        ("answers", "register", "the kubelet does not answer Register within 0.3 s"),
        ("asks", "connect", "registered, but the kubelet asks for no devices within 0.3 s"),
    ],
)
async def test_a_registration_that_the_kubelet_does_not_finish_in_time_is_tried_again(
    room: Room, said: Callable[[], list[str]], what: str, within: str, reason: str
) -> None:
    room.timing = replace(QUICK, **{within: 0.3})
    setattr(room.kubelet, what, False)
    async with room.running() as one:
        status = await first(one.status, lambda s: bool(s.reason))
        assert status.phase is SessionPhase.REGISTERING
        assert (status.reason, status.registrations) == (reason, 0)
        one.timing = QUICK
        setattr(room.kubelet, what, True)
        await room.registered()
        assert said() == [f"not registered; retrying: {reason}", "registered"]


async def test_kubelet_socket_made_anew_with_the_stream_open_is_nothing(
    room: Room, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    looks = Tries(monkeypatch, UnixServer, "exists")
    async with room.running() as one:
        before = await room.registered()
        await first(one.status, lambda s: s.phase is SessionPhase.REGISTERED)
        await room.kubelet.renew_socket()
        await looks.more(10)
        assert await room.told() == before
        assert room.kubelet.calls == 1
        assert said() == ["registered"]


@pytest.mark.usefixtures("unhurried")
async def test_the_kubelet_offers_devices_of_another_plugin(
    room: Room, said: Callable[[], list[str]]
) -> None:
    room.devices.publish((CARDS[0], replace(CARDS[1], healthy=False)))
    room.asked.allocatable = {RESOURCE: frozenset(("UUID-A", "more"))}
    async with room.running() as one:
        before = await room.registered()
        await room.more_asks(3)
        assert one.status.value.registrations == 1  # all that is healthy is offered
        room.asked.allocatable = {
            RESOURCE: frozenset(("vendor-0",)),
            "other/npu": frozenset(("UUID-A",)),
        }
        room.devices.publish(CARDS)
        await room.registered(after=before.endpoint)
        room.asked.allocatable = None  # it does not tell: no reason to do anything
        await room.more_asks(3)
        assert one.status.value.registrations == 2
    assert (
        "lost the kubelet; registering again: it no longer offers 2 of our devices, such as "
        "UUID-A: check for another plugin that registered the same resource"
    ) in said()


async def test_a_kubelet_that_never_says_that_it_offers_ours_is_left_alone_for_longer_each_time(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def soon(pause: Backoff) -> float:
        if pause.longest == QUICK.verify_backoff_max:
            tries.append(pause.tries)
        pause.tries += 1
        return 0.001

    monkeypatch.setattr(Backoff, "next", soon)
    room.asked.allocatable = {}
    async with room.running() as one:
        await first(one.status, lambda s: s.registrations == 4)
        assert tries[:3] == [0, 1, 2]
        room.asked.allocatable = {RESOURCE: frozenset(("UUID-A", "UUID-B"))}
        await room.more_asks(3)
        assert tries[-1] == 0  # it was of use


async def test_device_that_is_not_offered_for_a_moment_is_nothing(room: Room) -> None:
    looks = 0

    async def ask() -> dict[str, frozenset[str]]:
        nonlocal looks
        looks += 1
        return {RESOURCE: frozenset(("UUID-A",) if looks % 2 else ("UUID-B",))}

    room.asked.offered = ask  # type: ignore[method-assign]
    async with room.running() as one:
        await room.registered()
        await until(lambda: looks >= 6)
        assert one.status.value.registrations == 1


async def test_plugin_directory_is_missing_and_appears(
    room: Room, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    tries = Tries(monkeypatch, RegistrationTracker, "fails")
    await room.kubelet.stop()
    room.directory.rmdir()
    async with room.running() as one:
        await tries.more(5)
        assert one.status.value.phase is SessionPhase.BLOCKED
        assert one.status.value.reason == (
            f"{room.directory} does not exist: mount the kubelet's device-plugins directory "
            "there, or set --plugin-dir"
        )
        assert said() == [f"not registered; retrying: {one.status.value.reason}"]
        room.directory.mkdir()
        await room.kubelet.start()
        await room.registered()


@pytest.mark.parametrize(
    ("number", "ending"),
    [
        (errno.EACCES, "Permission denied: the agent needs uid 0 and must be able to write there"),
        (errno.EROFS, "Read-only file system: the agent needs uid 0 and must be able to write"),
        (errno.ENOSPC, "No space left on device"),
    ],
)
async def test_directory_that_cannot_be_written(
    room: Room, monkeypatch: pytest.MonkeyPatch, number: int, ending: str
) -> None:
    real = os.open

    def refuse(path: str | Path, *args: int) -> int:
        if str(path).endswith(".lock"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    async with room.running() as one:
        status = await first(one.status, lambda s: s.phase is SessionPhase.BLOCKED)
        assert ending in status.reason
        assert str(room.directory) in status.reason
        monkeypatch.setattr(os, "open", real)
        await room.registered()


async def test_no_cards_at_all_is_quiet_until_one_appears(
    room: Room, said: Callable[[], list[str]]
) -> None:
    room.devices.publish(())
    async with room.running() as one:
        for _ in range(20):
            await asyncio.sleep(0)
        assert one.status.value.phase is SessionPhase.NO_CARDS
        assert names(room.directory) == ["kubelet.sock"]
        assert not room.kubelet.plugins.value
        assert said() == []
        room.devices.publish(CARDS[:1])
        plugin = await room.registered()
        assert plugin.devices == (("UUID-A", "Healthy"),)


@pytest.mark.usefixtures("unhurried")
async def test_fickle_kubelet_is_asked_less_and_less(
    room: Room, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    pauses: list[int] = []

    class Recorded(Backoff):
        def next(self, retry_after: float | None = None) -> float:
            if self.longest == room.timing.flap_backoff_max:
                pauses.append(self.tries)
            return Backoff.next(self, retry_after)

    monkeypatch.setattr(session, "Backoff", Recorded)
    async with room.running() as one:
        for _ in range(4):
            plugin = await room.registered()
            room.kubelet.hang_up(RESOURCE)
            plugin = await room.registered(after=plugin.endpoint)
        assert pauses[:4] == [0, 1, 2, 3]
        one.timing = replace(QUICK, steady=0.0)  # this one lasted: counted anew
        room.kubelet.hang_up(RESOURCE)
        await room.registered(after=plugin.endpoint)
        assert pauses[4:] == [0]
    assert len(said()) == 2 * room.kubelet.calls - 1


async def test_no_device_is_offered_before_the_ledger_is_up_to_date(room: Room) -> None:
    asked, ready = asyncio.Event(), asyncio.Event()

    async def renew() -> None:
        asked.set()
        await ready.wait()

    room.allocator.renew = renew  # type: ignore[method-assign]
    async with room.running():
        await until(asked.is_set)
        assert not [name for name in names(room.directory) if name.startswith("npu-")]
        assert room.kubelet.calls == 0
        ready.set()
        await room.registered()


async def test_sockets_of_killed_agents_are_swept_at_the_start(room: Room) -> None:
    dead = room.directory / "npu-00000000.sock"
    other = room.directory / "npu-exporter.sock"  # of another program, which listens soon
    with socket.socket(socket.AF_UNIX) as left, socket.socket(socket.AF_UNIX) as foreign:
        left.bind(os.fspath(dead))
        foreign.bind(os.fspath(other))
        async with room.running():
            await room.registered()
            assert not dead.exists()
            assert other.exists()
