"""Scenarios on a living tree: what becomes of the Snapshot. Conditions are awaited, never slept."""

import _thread
import asyncio
import errno
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent.core import health
from npu_agent.core.changes import card_changes
from npu_agent.core.hardware import (
    Card,
    CardState,
    Cause,
    CoreReading,
    HealthState,
    Reading,
    Snapshot,
)
from npu_agent.core.trends import TrendKind
from npu_agent.core.vendor import Entry, Probe
from npu_agent.files import SIMULATION
from npu_agent.inventory import inventory
from npu_agent.inventory.card import ProbeSettings
from npu_agent.inventory.inventory import READ_DEADLINE, Inventory, Job, Prober
from npu_agent.inventory.uevents import KernelNews
from npu_agent.people import simulator
from npu_agent.people.cards import read_once
from npu_agent.people.simulator.tree import tick
from npu_agent.vendors.furiosa.families import WARBOY
from npu_agent.vendors.furiosa.sysfs import Furiosa
from tests.inventory.helpers import (
    QUICK,
    READINGS,
    Watched,
    bare_card,
    management,
    tree,
    watching,
    write,
)
from tests.outputs.deviceplugin.helpers import state as a_card
from tests.threads import no_thread_stays, ours
from tests.until import first, until

HEALTHY, UNHEALTHY, UNKNOWN = HealthState.HEALTHY, HealthState.UNHEALTHY, HealthState.UNKNOWN


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Two cards; at the end they are mended, which releases every reader that hangs."""
    root = tree(tmp_path / "host", "warboy=2")
    yield root
    for card in simulator.cards(root):
        simulator.apply_fault(root, card.spec.name, "ok")


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """Whatever happened in a test, it leaves no reader behind once the cards are mended."""
    with no_thread_stays():
        yield


def ids(snapshot: Snapshot) -> tuple[str, ...]:
    return tuple(state.id for state in snapshot.cards)


def names(snapshot: Snapshot) -> tuple[str, ...]:
    return tuple(state.card.name for state in snapshot.cards)


# A card that does not work.


@pytest.mark.parametrize(
    ("fault", "reason", "failure", "cause"),
    [
        ("dead", "alive says 0", None, Cause.DEAD),
        ("garbage", "alive says neither 0 nor 1 but binary data", "nonsense", Cause.NONSENSE),
        ("unreadable", "/npu0_mgmt/alive: Is a directory", "refused", Cause.NONSENSE),
        ("no-node", "/dev/npu0pe0 missing", None, Cause.NODES),
    ],
)
async def test_a_card_that_fails_is_fenced_and_comes_back(
    root: Path, fault: str, reason: str, failure: str | None, cause: Cause
) -> None:
    async with watching(root) as watched:
        before = watched.record.value
        await watched.looks(3)  # its probes change nothing any more
        watched.fault("npu0", fault)
        fenced = await watched.card("npu0", UNHEALTHY)
        assert reason in fenced.health.reason
        assert fenced.health.cause is cause
        assert fenced.health.since >= before.cards[0].health.since
        watched.fault("npu0", "ok")
        mended = await watched.card("npu0", HEALTHY)
        counted = {key: count > 1 for key, count in watched.inventory.failures.items()}
        assert counted == ({("warboy", "npu0", failure): True} if failure else {})
        assert (mended.health.reason, mended.health.cause) == ("works", None)
        assert mended.id == fenced.id == before.cards[0].id
        # The other card never was anything but healthy.
        assert {s.cards[1].health for s in watched.record.all} == {before.cards[1].health}


async def test_a_card_that_is_too_hot_is_fenced_if_that_is_asked_for(root: Path) -> None:
    """Its heat is read as often as its health then."""
    limit = health.Policy(max_temperature=90.0)
    seldom = replace(QUICK, telemetry_interval=3600.0, policy=limit)
    async with watching(root, settings=seldom) as watched:
        watched.fault("npu0", "hot")
        state = await watched.card("npu0", UNHEALTHY)
        assert state.health.reason.endswith("above 90 °C")
        assert state.health.cause is Cause.HOT
        watched.fault("npu0", "ok")
        await watched.card("npu0", HEALTHY)
        watched.settings.publish(QUICK)  # and without a limit it is nobody's business
        watched.fault("npu0", "hot")
        await watched.looks(5)
        assert watched.record.value.cards[0].health.state is HEALTHY


SELDOM = ProbeSettings(interval=3600, health_interval=3600, telemetry_interval=3600)


async def test_intervals_are_followed_while_it_runs(root: Path) -> None:
    """Immediately: not only after the ones before have passed."""
    async with watching(root, settings=SELDOM) as watched:
        simulator.make(root, simulator.parse_cards("warboy=3"))
        watched.fault("npu1", "dead")
        write(management(root, 0) / "fw_version", "9.9.9")
        watched.settings.publish(QUICK)
        await watched.names("npu0", "npu1", "npu2")
        await watched.card("npu1", UNHEALTHY)
        await watched.until(lambda s: s.cards[0].card.firmware_version == "9.9.9")
        await watched.looks(2)


async def test_nodes_of_the_host_are_followed_while_it_runs(root: Path) -> None:
    """In a simulated tree plain files stand for nodes, and a directory never does."""
    heap, other = "/dev/dma_heap/system", "/dev/vfio"
    quick = replace(QUICK, root=str(root))
    async with watching(root, settings=quick) as watched:
        assert not watched.record.value.missing_nodes
        watched.settings.publish(replace(quick, host_nodes=(heap, other)))
        lacking = await watched.until(lambda s: s.missing_nodes == (heap, other))
        assert {card.host_nodes for card in lacking.cards} == {()}
        assert all(card.health.state is HealthState.HEALTHY for card in lacking.cards)
        (root / "dev/dma_heap").mkdir()
        (root / "dev/dma_heap/system").touch()
        (root / "dev/vfio").mkdir()
        having = await watched.until(lambda s: s.missing_nodes == (other,))
        assert {card.host_nodes for card in having.cards} == {(heap,)}
        (root / "dev/dma_heap/system").unlink()
        await watched.until(lambda s: s.missing_nodes == (heap, other))
        watched.settings.publish(quick)
        await watched.until(lambda s: not s.missing_nodes)


async def test_a_card_is_not_offered_before_udev_has_made_its_nodes(root: Path) -> None:
    (root / "dev/npu0pe1").unlink()
    async with watching(root) as watched:
        (card, *_) = watched.record.value.cards
        assert (card.health.state, card.health.cause) == (UNHEALTHY, Cause.NODES)
        (root / "dev/npu0pe1").touch()
        await watched.card("npu0", HEALTHY)
        assert "npu0pe1" in watched.record.value.cards[0].card.nodes
        (root / "dev/npu0pe1").unlink()
        assert "/dev/npu0pe1 missing" in (await watched.card("npu0", UNHEALTHY)).health.reason


# A card that hangs.


async def test_a_card_that_hangs_is_fenced_alone_and_comes_back(root: Path) -> None:
    async with watching(root) as watched:
        other = watched.record.value.cards[1].health
        watched.fault("npu0", "hang")
        fenced = await watched.card("npu0", UNHEALTHY)
        assert fenced.health.reason == "no answer within 0.5 s"
        assert fenced.health.cause is Cause.HANGS
        # The search goes on, and so does the look at the other card.
        simulator.make(root, simulator.parse_cards("warboy=3"))
        await watched.names("npu0", "npu1", "npu2")
        watched.fault("npu1", "dead")
        await watched.card("npu1", UNHEALTHY)
        watched.fault("npu1", "ok")
        await watched.card("npu1", HEALTHY)
        watched.fault("npu0", "ok")
        assert (await watched.card("npu0", HEALTHY)).id == fenced.id
        assert watched.record.all[0].cards[1].health == other


async def test_a_card_that_hangs_from_the_first_look_hides_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    entry = management(root, 0)
    write(entry / "platform_type", None)
    os.mkfifo(entry / "platform_type")
    async with watching(root) as watched:
        first = watched.record.all[0]
        assert names(first) == ("npu1",)
        assert [odd.reason for odd in first.skipped] == ["no answer within 0.5 s"]
        await watched.looks(10)
        # It is asked again and again, and that is neither published nor logged again and again.
        assert {s.skipped for s in watched.record.all} == {first.skipped}
        assert sum("not served" in record.message for record in caplog.records) == 1
        release(entry / "platform_type", "FuriosaAI\n")
        await watched.names("npu0", "npu1")
        assert watched.record.value.skipped == ()


def release(pipe: Path, content: str) -> None:
    """A driver that comes to its senses: the reads that hang are answered, and so are all later."""
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write(pipe, content)
    os.write(descriptor, content.encode())
    os.close(descriptor)


async def test_cancelling_while_a_read_hangs_leaves_only_its_thread(root: Path) -> None:
    watched = Watched(root)
    running = asyncio.create_task(watched.inventory.run())
    await watched.until(lambda _: True)
    watched.fault("npu0", "hang")
    await watched.card("npu0", UNHEALTHY)
    running.cancel()
    async with asyncio.timeout(30):
        await asyncio.wait([running])
    assert running.cancelled()
    await until(lambda: len(ours()) == 1)


# Cards that come and go.


async def test_a_new_card_behind_the_same_entry_has_a_health_of_its_own(root: Path) -> None:
    """No event tells of it, only what the card says of itself."""
    async with watching(root) as watched:
        watched.fault("npu0", "dead")
        old = await watched.card("npu0", UNHEALTHY)
        watched.settings.publish(replace(QUICK, policy=health.Policy(recoveries=10**9)))
        entry = management(root, 0)
        write(entry / "alive", "1\n")
        write(entry / "device_sn", "")  # the new card has no serial, and gets none of the old
        write(entry / "device_uuid", "11111111-2222-4333-8444-555555555555\n")
        new = (await watched.until(lambda s: s.cards[0].id != old.id)).cards[0]
        assert (new.id, new.card.serial) == ("11111111-2222-4333-8444-555555555555", None)
        assert new.health.state is HEALTHY
        assert new.health.since > old.health.since


async def test_a_driver_reload_between_two_looks_does_not_flicker(
    root: Path,
) -> None:
    async with watching(root) as watched:
        watched.fault("npu0", "dead")
        fenced = await watched.card("npu0", UNHEALTHY)
        watched.record.all.clear()
        watched.settings.publish(replace(QUICK, policy=health.Policy(recoveries=10**9)))
        fresh = management(root, 0).with_name("fresh")
        shutil.copytree(management(root, 0), fresh)
        write(fresh / "alive", "1\n")
        # In one step, so that no look falls between the old entry and the new one.
        link = root / "sys/class/npu_mgmt/npu0_mgmt"
        (root / "link").symlink_to(fresh)
        (root / "link").replace(link)
        # A new entry: believed at its first look, not weighed against the old one's course.
        mended = await watched.card("npu0", HEALTHY)
        assert mended.id == fenced.id
        assert {names(s) for s in watched.record.all} == {("npu0", "npu1")}


async def test_renumbered_cards_keep_their_ids(root: Path, tmp_path: Path) -> None:
    async with watching(root) as watched:
        before = watched.record.value
        one, two = management(root, 0), management(root, 1)
        one.rename(tmp_path / "between")
        two.rename(one)
        (tmp_path / "between").rename(two)
        after = await watched.until(lambda s: len(s.cards) == 2 and s.cards[0].id == ids(before)[1])
        assert ids(after) == (ids(before)[1], ids(before)[0])


# What cannot be read for a moment.


async def test_an_identity_that_cannot_be_read_for_a_moment_stays(root: Path) -> None:
    async with watching(root) as watched:
        before = watched.record.value.cards[0]
        entry = management(root, 0)
        kept = ("device_uuid", "device_sn", "busname", "version", "fw_version", "dev")
        contents = {name: (entry / name).read_text(encoding="utf-8") for name in kept}
        for name in kept:
            write(entry / name, None)
            (entry / name).mkdir()
        await watched.looks(5)
        for name, content in contents.items():
            write(entry / name, content)
        await watched.looks(5)
        assert {s.cards[0].card for s in watched.record.all} == {before.card}
        assert {s.cards[0].id for s in watched.record.all} == {before.id}


async def test_a_type_that_cannot_be_read_fences_after_a_while_and_comes_back(root: Path) -> None:
    async with watching(root) as watched:
        before = watched.record.value.cards[0]
        file = management(root, 0) / "device_type"
        file.unlink()
        fenced = await watched.card("npu0", UNHEALTHY)
        assert "device_type" in fenced.health.reason
        assert (fenced.id, fenced.card) == (before.id, before.card)
        write(file, "Warboy\n")
        await watched.card("npu0", HEALTHY)


async def test_a_single_wrong_answer_changes_no_card(root: Path) -> None:
    class Lying(Furiosa):
        lies = 0

        def identify(self, entry: Entry) -> Card:
            card = super().identify(entry)
            if entry.index == 0 and self.lies:
                self.lies -= 1
                return replace(card, uuid=f"LIE-{self.lies}", driver_version="9.9.9")
            return card

    host = Lying(root)
    async with watching(root, host) as watched:
        host.lies = 1
        await watched.looks(5)
        assert host.lies == 0
        assert len({s.cards[0].card for s in watched.record.all}) == 1
        host.lies = 5  # each time another one: never two looks that agree
        await watched.looks(5)
        assert len({s.cards[0].card for s in watched.record.all}) == 1


async def test_a_search_that_fails_takes_no_card_away(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Blind(Furiosa):
        blind = False

        def scan(self) -> tuple[Entry, ...]:
            if self.blind:
                raise PermissionError(13, "Permission denied", "/sys/class/npu_mgmt")
            return super().scan()

    caplog.set_level(logging.INFO)
    host = Blind(root)
    async with watching(root, host) as watched:
        host.blind = True
        blind = await watched.until(lambda s: s.skipped != ())
        assert names(blind) == ("npu0", "npu1")
        assert blind.skipped[0].reason == (
            "cannot be searched for cards: /sys/class/npu_mgmt: Permission denied"
        )
        watched.fault("npu0", "dead")
        await watched.card("npu0", UNHEALTHY)
        host.blind = False
        await watched.until(lambda s: s.skipped == ())
    assert "cards can be searched for again" in caplog.messages


async def test_a_search_that_hangs_takes_no_card_away(root: Path) -> None:
    class Stuck(Furiosa):
        go_on = threading.Event()

        def scan(self) -> tuple[Entry, ...]:
            self.go_on.wait(30)
            return super().scan()

    host = Stuck(root)
    host.go_on.set()
    async with watching(root, host) as watched:
        await watched.until(lambda s: len(s.cards) == 2)
        host.go_on.clear()
        stuck = await watched.until(lambda s: s.skipped != ())
        assert names(stuck) == ("npu0", "npu1")
        assert stuck.skipped[0].reason == "cannot be searched for cards: no answer within 0.5 s"
        host.go_on.set()
        await watched.until(lambda s: s.skipped == () and len(s.cards) == 2)


async def test_until_a_first_search_has_succeeded_nothing_is_known(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A search that is late is no host without cards: slices and condition would follow that."""

    class Slow(Furiosa):
        searches = 0
        go_on = threading.Event()

        def scan(self) -> tuple[Entry, ...]:
            self.searches += 1
            if self.searches == 1:
                raise PermissionError(13, "Permission denied", "/sys/class/npu_mgmt")
            self.go_on.wait(30)
            if self.searches > 2:
                raise PermissionError(13, "what a search said that was late counts, once")
            return super().scan()

    caplog.set_level(logging.INFO)
    host = Slow(root)
    watched = Watched(root, host)
    running = asyncio.create_task(watched.inventory.run())
    reasons = ("/sys/class/npu_mgmt: Permission denied", "no answer within 0.5 s")
    for reason in reasons:
        why = f"cannot be searched for cards: {reason}"
        await first(watched.record, lambda s, why=why: why in [o.reason for o in s.skipped])  # type: ignore[misc]
    assert not any(s.complete or s.cards for s in watched.record.all)
    assert not any("no cards" in message for message in caplog.messages)
    host.go_on.set()
    await watched.names("npu0", "npu1")
    assert names(next(s for s in watched.record.all if s.complete)) == ("npu0", "npu1")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_first_read_that_is_late_once_is_waited_for(root: Path) -> None:
    class Late(Furiosa):
        def identify(self, entry: Entry) -> Card:
            if entry.index == 0:
                go_on.wait(30)
            return super().identify(entry)

    go_on = threading.Event()
    asyncio.get_running_loop().call_later(READ_DEADLINE * 1.5, go_on.set)
    steady = replace(QUICK, health_interval=READ_DEADLINE, policy=health.Policy(failures=3))
    async with watching(root, Late(root), steady) as watched:
        assert names(watched.record.all[0]) == ("npu0", "npu1")


# What cores do.


class Counted(Furiosa):
    """Counts looks: at cores, and at whether cards work."""

    cores_looks = liveness_looks = 0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()

    def read_cores(
        self, entry: Entry, frequencies: tuple[int | None, ...] = ()
    ) -> tuple[CoreReading, ...]:
        try:
            return super().read_cores(entry, frequencies)
        finally:
            self.cores_looks += 1
            self._loop.call_soon_threadsafe(self._more.set)

    def probe(self, entry: Entry) -> Probe:
        self.liveness_looks += 1
        return super().probe(entry)

    async def look_at_cores(self, count: int = 2) -> None:
        """Returns after so many looks more: the last one but one began after the call."""
        enough = self.cores_looks + count
        async with asyncio.timeout(30):
            while self.cores_looks < enough:
                self._more.clear()
                await self._more.wait()


def work(root: Path, before: tuple[simulator.SimulatedCard, ...]) -> float:
    """Per cent of its cycles that a Warboy whose cores are fused worked since then."""
    old, new = before[0].telemetry, simulator.cards(root)[0].telemetry
    passed = new.cycles[0] - old.cycles[0]
    return 100 * (sum(new.task_cycles) - sum(old.task_cycles)) / 2 / passed


def utilizations(snapshot: Snapshot) -> tuple[float | None, ...]:
    reading = snapshot.cards[0].reading
    return tuple(core.utilization for core in reading.cores) if reading else ()


async def showed(watched: Watched, condition: Callable[[tuple[float | None, ...]], bool]) -> None:
    """Returns once a reading fulfilled it; a reader of the feed might miss that one."""
    while not any(condition(utilizations(s)) for s in watched.record.all):
        await watched.looks(1)


async def test_load_shows_in_the_next_reading_and_ends_with_it(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    async with watching(root, settings=READINGS) as watched:
        assert utilizations(watched.record.value) == (0, 0)
        watched.fault("npu0", "busy")
        await watched.looks(2)
        before = simulator.cards(root)
        tick(root)
        both_cores = pytest.approx((work(root, before),) * 2)
        await showed(watched, lambda found: found == both_cores)
        await watched.looks(2)  # nothing moves: 0 of 0 cycles
        assert utilizations(watched.record.value) == (None, None)
        watched.fault("npu0", "idle")
        await watched.until(lambda s: utilizations(s) == (0, 0))


async def test_load_stays_where_heat_has_the_card_read_more_often_than_it_counts(
    tmp_path: Path,
) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    policy = health.Policy(max_temperature=200)
    settings = replace(READINGS, telemetry_interval=3600, policy=policy)
    async with watching(root, settings=settings) as watched:
        watched.fault("npu0", "busy")
        await watched.looks(2)
        tick(root)
        await showed(watched, lambda found: (found[0] or 0) > 70)
        await watched.looks(3)
        assert min(load or 0 for load in utilizations(watched.record.value)) > 70


async def test_counters_that_wrap_are_looked_at_between_two_readings(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    simulator.apply_fault(root, "npu0", "busy")
    host = Counted(root)
    async with watching(
        root, host, replace(QUICK, telemetry_interval=3600, counter_interval=0.01)
    ) as watched:
        await host.look_at_cores()
        before = simulator.cards(root)
        for _ in range(3):
            tick(root, 3.0)  # all of it is 9e9 cycles, and they wrap at 4.3e9
            await host.look_at_cores()
        first = watched.record.value
        assert first.cards[0].reading == watched.record.all[0].cards[0].reading
        watched.fault("npu0", "dead")  # a change of health brings a reading
        shown = await watched.until(lambda s: s.cards[0].reading != first.cards[0].reading)
        assert utilizations(shown) == pytest.approx((work(root, before),) * 2)


async def test_counters_are_looked_at_while_looks_at_health_are_rare(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    simulator.apply_fault(root, "npu0", "busy")
    host = Counted(root)
    async with watching(root, host, replace(QUICK, health_interval=1e9, counter_interval=0.02)):
        await host.look_at_cores(5)
        assert host.liveness_looks == 1


async def test_counters_that_hang_between_two_probes_fence_the_card_alone(root: Path) -> None:
    simulator.apply_fault(root, "npu0", "busy")
    settings = replace(QUICK, telemetry_interval=3600, health_interval=0.5, counter_interval=0.02)
    async with watching(root, settings=settings) as watched:
        pipe = management(root, 0).parent / "npu0pe1/perf_regs"
        pipe.unlink()
        os.mkfifo(pipe)
        fenced = await watched.card("npu0", UNHEALTHY)
        assert fenced.health.reason == "no answer within 0.5 s"
        release(pipe, "\n")
        await watched.card("npu0", HEALTHY)
        assert {s.cards[1].health.state for s in watched.record.all} == {HEALTHY}


# A fault of our own.


class Faulty(Furiosa):
    """Raises what no reader should raise, for one card."""

    broken = True

    def read(self, entry: Entry, card: Card) -> Reading:
        if self.broken and entry.index == 0:
            raise ZeroDivisionError("a bug")
        return super().read(entry, card)


async def test_a_bug_that_one_card_brings_out_hides_no_other(root: Path) -> None:
    host = Faulty(root)
    async with watching(root, host) as watched:
        shown = await watched.until(lambda s: s.skipped != ())
        assert shown.skipped[0].reason == "internal error: ZeroDivisionError('a bug')"
        await until(lambda: watched.restarts["watch of npu0"])
        watched.fault("npu1", "dead")
        await watched.card("npu1", UNHEALTHY)
        host.broken = False
        await watched.card("npu0", HEALTHY)
        await watched.until(lambda s: s.skipped == () and len(s.cards) == 2)


async def test_an_inventory_that_is_started_again_watches_again_and_does_not_flicker(
    root: Path,
) -> None:
    watched = Watched(root)
    for _ in range(2):
        running = asyncio.create_task(watched.inventory.run())
        await watched.names("npu0", "npu1")
        for fault, state in (("dead", UNHEALTHY), ("ok", HEALTHY)):
            watched.fault("npu0", fault)
            await watched.card("npu0", state)
        running.cancel()
        await asyncio.wait([running])
    assert {names(s) for s in watched.record.all} == {("npu0", "npu1")}


# What is logged.


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([], [a_card(id_="A")], ["INFO card added"]),
        ([a_card(id_="A")], [a_card(id_="B")], ["WARNING card exchanged"]),
        ([a_card(id_="A")], [a_card(index=1, id_="A")], ["WARNING card renumbered"]),
        ([a_card(id_="A")], [a_card(id_="A", health=UNHEALTHY)], ["WARNING card unhealthy"]),
        ([a_card(id_="A", health=UNHEALTHY)], [a_card(id_="A")], ["INFO card healthy"]),
        ([a_card(id_="A")], [a_card(id_="A", health=UNKNOWN)], ["INFO card unknown"]),
        ([a_card(id_="A")], [a_card(id_="A")], []),
        (
            [a_card(id_="A")],
            [],
            ["WARNING card removed", "INFO no cards on this host; waiting for some"],
        ),
    ],
)
def test_each_change_is_one_line(
    before: list[CardState],
    after: list[CardState],
    said: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    was, now = Snapshot(tuple(before), complete=True), Snapshot(tuple(after), complete=True)
    inventory._log_changes(was, now, tuple(card_changes(was, now)))
    assert [f"{record.levelname} {record.message}" for record in caplog.records] == said


# The first look, and many cards.


async def test_64_cards_are_published_once_each_was_looked_at(tmp_path: Path) -> None:
    (tmp_path / SIMULATION).mkdir()  # plain files stand for nodes
    (tmp_path / "dev").mkdir()
    for index in range(64):
        bare_card(tmp_path, index, f"UUID-{index}")
        for node in WARBOY.nodes(index):
            (tmp_path / "dev" / node).touch()
    async with watching(tmp_path) as watched:
        first = watched.record.all[0]
        assert ids(first) == tuple(f"UUID-{index}" for index in range(64))
        assert all(state.reading for state in first.cards)
        write(tmp_path / "sys/class/npu_mgmt/npu63_mgmt/alive", "0")
        fenced = await watched.until(
            lambda s: [c.card.index for c in s.cards if c.health.cause is Cause.DEAD] == [63]
        )
        assert len(fenced.cards) == 64


async def test_an_equal_snapshot_is_not_published(root: Path) -> None:
    host = Counted(root)
    async with watching(root, host, replace(QUICK, telemetry_interval=3600)) as watched:
        before = len(watched.record.all)
        probes = host.liveness_looks
        await until(lambda: host.liveness_looks > probes + 10)
        assert len(watched.record.all) == before


async def test_read_once_fails_if_the_inventory_does(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than to wait for a Snapshot that never comes."""

    async def fail(_self: Inventory) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Inventory, "run", fail)
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup):
            await read_once(Furiosa(root))


# Threads.


async def test_a_job_that_hangs_keeps_one_thread_and_the_others_run() -> None:
    gate, prober = threading.Event(), Prober(deadline=0.05)
    hung = Job(gate.wait)
    rest = [Job(lambda n=n: n) for n in range(3)]  # type: ignore[misc]
    await prober.run([rest[0], hung, *rest[1:]])
    assert [job.result for job in rest] == [0, 1, 2]
    assert (hung.begun, hung.done) == (True, False)
    again = Job(lambda: "next")
    await prober.run([again])
    assert again.result == "next"
    # On a busy machine others may have been late, too; their threads end soon.
    await until(lambda: len(ours()) == 1)
    gate.set()
    await until(lambda: hung.done)


async def test_jobs_that_all_hang_are_all_begun() -> None:
    """In one batch: not one more with each batch."""
    gate, prober = threading.Event(), Prober(deadline=0.05)
    jobs = [Job(gate.wait) for _ in range(8)]
    await prober.run(jobs)
    gate.set()
    assert all(job.begun for job in jobs)


async def test_a_hung_card_that_goes_and_returns_has_one_thread(root: Path, tmp_path: Path) -> None:
    async with watching(root) as watched:
        await until(lambda: len(ours()) == 1)
        entry, away = management(root, 0), tmp_path / "away"
        watched.fault("npu0", "hang")
        await watched.card("npu0", UNHEALTHY)
        entry.rename(away)
        await watched.names("npu1")
        await until(lambda: len(ours()) == 2)  # it still hangs
        away.rename(entry)
        await watched.until(lambda s: s.skipped != ())
        await until(lambda: len(ours()) == 2)
        release(entry / "alive", "1\n")
        await watched.card("npu0", HEALTHY)
        await until(lambda: len(ours()) == 1)


async def test_threads_that_the_system_refuses_take_no_card_away(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async with watching(root) as watched:
        with monkeypatch.context() as patched:
            patched.setattr(_thread, "start_new_thread", refuse)
            watched.fault("npu0", "hang")
            await watched.card("npu0", UNHEALTHY)
            await until(lambda: len(ours()) == 1)
            watched.fault("npu1", "dead")
            await until(lambda: any("gives us no thread" in line for line in caplog.messages))
            assert names(watched.record.value) == ("npu0", "npu1")
        await watched.card("npu1", UNHEALTHY)  # there are threads again
        assert watched.record.value.skipped == ()


async def test_a_cards_counts_end_with_it(root: Path) -> None:
    async with watching(root) as watched:
        watched.fault("npu0", "unreadable")
        await until(lambda: watched.inventory.failures)
        assert {key[1] for key in watched.inventory.failures} == {"npu0"}
        watched.fault("npu0", "gone")
        await watched.names("npu1")
        assert watched.inventory.failures == Counter()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/sys/class"), MemoryError()],
    ids=["EMFILE", "memory"],
)
@pytest.mark.parametrize("verb", ["probe", "identify", "read"])
async def test_limits_of_our_own_fence_no_card(
    root: Path,
    verb: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, at_the_limit, tries = Furiosa(root), threading.Event(), Counter[str]()
    works = getattr(host, verb)

    def limited(*arguments: object) -> object:
        if at_the_limit.is_set():
            tries[verb] += 1
            raise error
        return works(*arguments)

    monkeypatch.setattr(host, verb, limited)
    async with watching(root, host, replace(QUICK, policy=health.Policy(failures=1))) as watched:
        before = watched.record.value
        at_the_limit.set()
        await until(lambda: tries[verb] > 10)
        at_the_limit.clear()
        await watched.looks(2)
        assert {tuple(c.health for c in s.cards) for s in watched.record.all} == {
            tuple(c.health for c in before.cards)
        }
        assert not watched.inventory.failures  # nor are they counted as the card's
    assert (
        caplog.messages.count("cannot read cards (a limit of the agent's process); retrying") == 2
    )  # once for each card


async def test_at_a_limit_of_our_own_nothing_is_known_at_first(root: Path) -> None:
    class Limited(Furiosa):
        tries = 0

        def identify(self, entry: Entry) -> Card:
            self.tries += 1
            if self.tries < 20:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/sys/class")
            return super().identify(entry)

    async with watching(root, Limited(root)) as watched:
        assert names(watched.record.all[0]) == ("npu0", "npu1")
        assert not watched.record.all[0].skipped


# IDs.


async def test_a_card_that_was_known_before_keeps_its_id(root: Path) -> None:
    before = (await read_once(Furiosa(root))).cards[0]
    write(management(root, 0) / "device_uuid", None)
    known = {before.id: before.card.identities}
    inventory = Inventory(Furiosa(root), known=known)
    running = asyncio.create_task(inventory.run())
    snapshot = await first(inventory.snapshots, lambda snapshot: snapshot.complete)
    running.cancel()
    await asyncio.wait([running])
    assert snapshot.cards[0].id == before.id
    assert snapshot.cards[0].card.uuid is None


# What lasts.


async def test_heat_and_a_uuid_of_two_cards_are_logged_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with watching(root) as watched:
        trends = watched.inventory.trends
        watched.fault("npu0", "hot")
        await trends.until(lambda found: found.of(TrendKind.HOT))
        await watched.looks(3)
        watched.fault("npu0", "ok")
        await trends.until(lambda found: not found.of(TrendKind.HOT))
        # Last: another UUID makes a new entry in the tree, and a new entry's card is read again.
        for name in ("npu0", "npu1"):
            watched.fault(name, "twin")
        await trends.until(lambda found: len(found.of(TrendKind.TWINS)) == 2)
        await watched.looks(3)
    for line in ("is hot", "is no longer hot"):
        assert caplog.messages.count(f"card {line}") == 1
    assert caplog.messages.count("card reports the UUID of another card") == 2


async def test_a_card_that_comes_and_goes_keeps_its_id_and_is_soon_one_line(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # Two probes are further apart than the removals of a simulated card's files.
    async with watching(root, settings=replace(QUICK, health_interval=0.2)) as watched:
        before = ids(watched.record.value)
        for _ in range(10):
            watched.fault("npu1", "gone")
            await watched.names("npu0")
            watched.fault("npu1", "back")
            assert ids(await watched.names("npu0", "npu1")) == before
        assert {card.health.state for card in watched.record.value.cards} == {HEALTHY}
        assert caplog.messages.count("card is flapping") == 1
        assert caplog.messages.count("card removed") == 3


# What an idle agent does.


class CountedProbes(Furiosa):
    """Counts what threads ask, and looks at each node."""

    searches = 0
    probes = 0
    looks = 0

    def scan(self) -> tuple[Entry, ...]:
        self.searches += 1
        return super().scan()

    def probe(self, entry: Entry) -> Probe:
        self.probes += 1
        return super().probe(entry)

    def _is_node(self, path: str) -> bool:
        self.looks += 1
        return super()._is_node(path)


UNREAD = replace(QUICK, telemetry_interval=3600, counter_interval=3600)


async def test_while_nothing_changes_cards_are_probed_and_the_loop_sleeps(root: Path) -> None:
    host = CountedProbes(root)
    async with watching(root, host, UNREAD) as watched:
        await until(lambda: host.probes > 20)
        rounds = 0
        ask = watched.inventory._round

        async def counted(settings: ProbeSettings) -> None:
            nonlocal rounds
            rounds += 1
            await ask(settings)

        watched.inventory._round = counted  # type: ignore[method-assign]
        probes, searches = host.probes, host.searches
        await until(lambda: host.probes > probes + 40 and host.searches > searches + 20)
        assert rounds == 0
        watched.fault("npu1", "dead")
        await watched.card("npu1", UNHEALTHY)
        assert rounds > 0


async def test_nodes_are_looked_at_when_their_directory_has_changed(root: Path) -> None:
    host = CountedProbes(root)
    async with watching(root, host, UNREAD) as watched:
        await until(lambda: host.probes > 20)
        probes, looks = host.probes, host.looks
        await until(lambda: host.probes > probes + 40)
        assert host.looks == looks
        (root / "dev/npu0pe0").unlink()
        fenced = await watched.card("npu0", UNHEALTHY)
        assert "/dev/npu0pe0 missing" in fenced.health.reason


async def test_a_node_that_becomes_another_kind_of_file_is_found_after_a_while(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_agent.vendors.furiosa.sysfs._LOOK_AGAIN", 0.1)
    target = root / "elsewhere"
    (root / "dev/npu0pe0").rename(target)
    (root / "dev/npu0pe0").symlink_to(target)
    async with watching(root, settings=UNREAD) as watched:
        await watched.card("npu0", HEALTHY)
        target.unlink()  # which leaves the directory as it is
        await watched.card("npu0", UNHEALTHY)


async def test_where_the_kernel_reports_cards_the_search_is_rare_and_follows_its_word(
    root: Path,
) -> None:
    host = CountedProbes(root)
    async with watching(root, host, replace(UNREAD, interval=3600)) as watched:
        watched.kernel.publish(KernelNews(0, is_open=True))
        await until(lambda: host.probes > 20)
        probes, searches = host.probes, host.searches
        await until(lambda: host.probes > probes + 40)
        assert host.searches == searches
        simulator.make(root, simulator.parse_cards("warboy=3"))
        watched.kernel.publish(KernelNews(1, is_open=True))
        await watched.names("npu0", "npu1", "npu2")


async def test_a_card_that_leaves_is_missed_without_a_word_of_the_kernel(root: Path) -> None:
    async with watching(root, settings=replace(UNREAD, interval=3600)) as watched:
        watched.kernel.publish(KernelNews(0, is_open=True))
        watched.fault("npu1", "gone")
        await watched.names("npu0")


async def test_counters_that_wrap_are_read_once_before_a_reading_that_is_far_away(
    tmp_path: Path,
) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    simulator.apply_fault(root, "npu0", "busy")
    host = Counted(root)
    unread = replace(QUICK, telemetry_interval=3.0, counter_interval=1.8)
    async with watching(root, host, unread) as watched:
        first = watched.record.value.cards[0].reading
        looks = host.cores_looks
        await watched.until(lambda s: s.cards[0].reading != first)
        assert host.cores_looks - looks == 2
