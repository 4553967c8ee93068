import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from npu_agent import rounds
from npu_agent.rounds import Rounds, Task, _Hand, _Pause
from tests.until import until

LONG = 30.0
TWO = ["npu-probes", "npu-probes"]


class Probe(Task):
    """Done each 10 ms, until it has to hang."""

    def __init__(self, name: str, changed: Callable[[], None]) -> None:
        super().__init__(name, changed)
        self.done = self.missed_so_far = 0
        self.longest_wait = 0.0
        self.threads: set[threading.Thread] = set()
        self.works = threading.Event()
        self.works.set()
        self.fails: BaseException | None = None
        """What it raises the next time."""
        self.check_fails: BaseException | None = None

    def begins(self, waited: float = 0.0) -> None:
        self.longest_wait = max(self.longest_wait, waited)
        super().begins(waited)

    def do(self) -> None:
        self.threads.add(threading.current_thread())
        self.works.wait(LONG)
        self.done += 1
        error, self.fails = self.fails, None
        if error:
            raise error
        self.due = rounds.next_moment(0.01)

    def check(self) -> float:
        error, self.check_fails = self.check_fails, None
        if error:
            raise error
        with self.lock:
            missed, due = self.missed(0.01)
        if missed:
            self.missed_so_far += missed
            self.report()
        return due


class Crew:
    """Rounds of some probes, and what they do."""

    def __init__(self, count: int) -> None:
        self.news = 0
        self.fails: BaseException | None = None
        """What `changed` raises the next time."""
        self.before = set(threading.enumerate())
        self.probes = [Probe(f"card-{number}", self.changed) for number in range(count)]
        self.rounds = Rounds()
        self.follow(*self.probes)

    def follow(self, *probes: Probe) -> None:
        self.rounds.follow(self, probes)

    def changed(self) -> None:
        error, self.fails = self.fails, None
        if error:
            raise error
        self.news += 1

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in set(threading.enumerate()) - self.before)

    async def go_on(self, *probes: Probe) -> None:
        """Returns after each was done some times more."""
        enough = {probe: probe.done + 3 for probe in probes or self.probes}
        await until(lambda: all(probe.done >= count for probe, count in enough.items()))


@pytest.fixture
async def crew() -> AsyncIterator[Crew]:
    crew = Crew(4)
    await until(lambda: crew.threads() == TWO)
    yield crew
    for probe in crew.probes:
        probe.works.set()
    crew.follow()
    await until(lambda: crew.threads() == [])


async def test_two_threads_make_the_rounds(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_PATIENCE", LONG)  # on a busy machine one may seem to hang
    await crew.go_on()
    for probe in crew.probes:
        probe.threads.clear()
    await crew.go_on()
    assert len(set[threading.Thread]().union(*(probe.threads for probe in crew.probes))) <= 2
    await until(lambda: crew.threads() == TWO)


async def test_rounds_half_a_second_apart_wake_one_thread_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And in turns, so that each looks after the other."""
    made: list[tuple[float, int]] = []
    woken: list[float] = []

    class Slow(Task):
        def do(self) -> None:
            made.append((time.monotonic(), threading.get_ident()))
            self.due = rounds.next_moment(0.5)

        def check(self) -> None:
            pass

    class Pause(_Pause):
        def until(self, moment: float) -> None:
            super().until(moment)
            woken.append(time.monotonic())

    monkeypatch.setattr(rounds, "_Pause", Pause)
    mine = Rounds()
    mine.follow(mine, (Slow("slow", lambda: None),))
    await until(lambda: len(made) >= 5)
    mine.follow(mine, ())
    (first, one), (_, other), (last, again) = made[2:5]
    assert len([at for at in woken if first - 0.1 < at < last - 0.1]) == 2
    assert one == again != other


async def test_never_are_both_threads_amid_a_round(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both might hang, and nobody would be left."""
    amid, made, most = list[_Hand](), list[_Hand](), 0
    make = Rounds._round

    def counted(self: Rounds, me: _Hand) -> bool:
        nonlocal most
        amid.append(me)
        made.append(me)
        most = max(most, len(amid))
        time.sleep(0.05)  # so that the other one, if it comes now, comes amid this one
        try:
            return make(self, me)
        finally:
            amid.remove(me)

    monkeypatch.setattr(Rounds, "_round", counted)
    for _ in range(5):
        made.clear()
        crew.rounds.wake()
        await until(lambda: len(made) > 1)
    assert most == 1


async def test_the_last_to_go_ends_the_threads(crew: Crew) -> None:
    """And the next to come has them again."""
    crew.follow()
    await until(lambda: crew.threads() == [])
    crew.follow(*crew.probes)
    await crew.go_on()
    await until(lambda: crew.threads() == TWO)


async def test_the_others_do_not_wait_for_the_deadline_of_one_that_hangs(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "READ_DEADLINE", 10 * LONG)
    first, *others = crew.probes
    first.works.clear()
    await until(lambda: crew.threads() == ["card-0", *TWO])
    await crew.go_on(*others)
    assert first.missed_so_far == 0
    first.works.set()
    await crew.go_on()
    await until(lambda: crew.threads() == TWO)


async def test_several_that_hang_together_are_found_together(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one after the other, each a while later."""
    monkeypatch.setattr(rounds, "_PATIENCE", 0.5)
    begun = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        if thread.name == "npu-probes":
            begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    with crew.rounds._lock:  # all at the same moment
        for probe in crew.probes[:3]:
            probe.works.clear()
    hang = ["card-0", "card-1", "card-2"]
    await until(lambda: crew.threads() == [*hang, *TWO])
    await crew.go_on(crew.probes[3])
    assert len(begun) == 1  # one took over
    await until(lambda: all(probe.missed_so_far > 2 for probe in crew.probes[:3]))
    assert crew.probes[3].missed_so_far == 0


async def test_deadlines_are_counted_once_each(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "READ_DEADLINE", 0.2)
    hangs = crew.probes[0]
    began = time.monotonic()
    hangs.works.clear()
    await until(lambda: hangs.missed_so_far >= 5)
    assert time.monotonic() - began >= 0.2 + 4 * 0.01 - 0.02  # it may have been asked before
    assert hangs.missed_so_far <= (time.monotonic() - began - 0.2 + 0.02) / 0.01 + 1
    assert crew.news > 0


@pytest.mark.parametrize(
    ("waited", "counts"),
    [
        (0.0, {0.4: 0, 0.5: 1, 0.9: 1, 1.0: 2, 1.5: 3}),
        (0.5, {0.4: 0, 0.5: 2, 0.9: 2, 1.0: 3}),  # it was due with one that hung
        (0.2, {0.4: 0, 0.5: 1, 0.7: 1, 0.8: 2, 1.3: 3}),
    ],
)
def test_what_had_to_wait_for_one_that_hangs_is_found_as_soon(
    waited: float, counts: dict[float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    task = Probe("card", lambda: None)
    task.begins(waited)
    found, due = 0, 0.0
    for later, count in counts.items():
        now = 1000.0 + later + 1e-6
        if later + 1000.0 > due + 1e-3:
            assert count == found  # nothing has been missed that nobody was to ask for
        with task.lock:
            missed, due = task.missed(0.5)
        found += missed
        assert found == count
        assert due > now


@pytest.mark.parametrize("stopped", ["never", "before", "meanwhile"])
async def test_what_had_to_wait_is_counted_from_the_hang_on(
    crew: Crew, stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not while the whole process was stopped: a slow read after that is no hang."""
    ahead = 0.0
    monkeypatch.setattr(rounds, "_PATIENCE", 1.0)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr(rounds, "time", clock)
    first, *others = crew.probes
    await crew.go_on()
    for probe in crew.probes:
        probe.longest_wait = 0.0
    with crew.rounds._lock:
        first.works.clear()
        ahead = 100.0 if stopped == "before" else 0.0
    await until(lambda: first.busy)
    ahead = 0.0 if stopped == "never" else 100.0
    await until(lambda: "card-0" in crew.threads())
    await crew.go_on(*others)
    longest = max(probe.longest_wait for probe in others)
    assert longest < 50.0
    if stopped == "never":
        assert longest > 0.1
    assert first.longest_wait == 0.0


async def test_what_is_late_though_nothing_hangs_has_not_waited(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "_PATIENCE", math.inf)
    await crew.go_on()
    for probe in crew.probes:
        probe.longest_wait = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 100.0)
    monkeypatch.setattr(rounds, "time", clock)
    await crew.go_on()
    assert [probe.longest_wait for probe in crew.probes] == [0.0] * 4


def test_a_longer_interval_takes_no_deadline_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    task = Probe("card", lambda: None)
    task.begins()

    def missed(after: float, interval: float) -> int:
        nonlocal now
        now = 1000.0 + after + 1e-6
        with task.lock:
            missed, due = task.missed(interval)
        assert due > now
        return missed

    assert missed(0.8, 0.1) == 4
    assert missed(0.9, 60.0) == 0
    assert missed(1.0, 0.1) == 2
    task.asks()  # another read
    assert missed(1.4, 60.0) == 0
    assert missed(1.5, 60.0) == 1


async def test_a_round_ends_with_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_PATIENCE", LONG)
    first, second = (Probe(name, lambda: None) for name in ("first", "second"))
    first.works.clear()
    mine = Rounds()
    mine.follow(mine, (first, second))
    await until(lambda: first.threads)
    mine.follow(mine, ())
    first.works.set()
    await until(lambda: not any(thread.is_alive() for thread in first.threads))
    assert (first.done, second.done) == (1, 0)


async def test_one_that_is_left_out_while_it_hangs_is_not_done_again(crew: Crew) -> None:
    first, *others = crew.probes
    first.works.clear()
    await until(lambda: "card-0" in crew.threads())
    crew.follow(*others)
    first.works.set()
    await until(lambda: "card-0" not in crew.threads())
    await crew.go_on(*others)  # the round that was under way may have had it
    done = first.done
    await crew.go_on(*others)
    assert first.done == done


async def test_what_is_new_in_a_round_is_told_once(crew: Crew) -> None:
    for probe in crew.probes:
        probe.report()
    await crew.go_on()
    assert 1 <= crew.news <= 2  # a round may have ended in between


async def test_a_task_that_becomes_due_is_done_after_wake(crew: Crew) -> None:
    late = Probe("late", crew.changed)
    late.due = time.monotonic() + 10 * LONG
    crew.follow(late)
    done = -1
    while done < (done := sum(probe.done for probe in crew.probes)):  # they rest by now
        await asyncio.sleep(0.05)
    assert late.done == 0
    late.due = 0.0
    crew.rounds.wake()
    await crew.go_on(late)


# What must not end them.


async def test_tasks_that_are_never_due_end_no_thread(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    """The only other one hangs: whoever takes over has nothing to do, for ever."""
    hangs, *others = crew.probes
    crew.follow(hangs)
    for probe in others:
        probe.due = math.inf
    crew.follow(hangs, *others)
    hangs.works.clear()
    await until(lambda: crew.threads() == ["card-0", *TWO])
    hangs.works.set()
    await until(lambda: "card-0" not in crew.threads())
    await crew.go_on(hangs)
    await until(lambda: crew.threads() == TWO)
    assert caplog.messages == []


def test_a_pause_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_LONGEST_REST", 0.01)
    _Pause().until(math.inf)


async def test_a_task_that_fails_is_done_again_and_keeps_no_other_back(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds, "_AFTER_A_FAULT", 0.05)
    crew.probes[0].fails = MemoryError("for a moment")
    await until(lambda: crew.probes[0].fails is None)
    await crew.go_on()
    await until(lambda: crew.threads() == TWO)
    (record,) = caplog.records
    assert record.message == "a task of the rounds failed"
    assert record.exc_info
    assert "for a moment" in str(record.exc_info[1])


@pytest.mark.parametrize("where", ["news", "check"])
async def test_a_fault_between_two_tasks_does_not_end_the_rounds(
    where: str, crew: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds, "_AFTER_A_FAULT", 0.05)
    first = crew.probes[0]
    if where == "news":
        crew.fails = MemoryError("for a moment")
        first.report()
        await until(lambda: crew.fails is None)
        await until(lambda: crew.news == 1)  # what could not be passed on was not lost
    else:
        first.check_fails = MemoryError("for a moment")
        first.works.clear()
        await until(lambda: first.check_fails is None)
        await until(lambda: first.missed_so_far > 0)
        first.works.set()
    await crew.go_on()
    await until(lambda: crew.threads() == TWO)
    assert caplog.messages == ["the rounds of the cards failed, and go on"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_ends_is_replaced(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    """`SystemExit` ends a thread without a word."""
    first = crew.probes[0]
    first.fails = SystemExit()
    await until(lambda: first.fails is None)
    await crew.go_on()
    await until(lambda: crew.threads() == TWO)
    ended = "a thread that probes the cards has ended: another one takes its place"
    assert caplog.messages == [ended]
    first.works.clear()
    await until(lambda: "card-0" in crew.threads())
    first.check_fails = SystemExit()  # now one that looks after a task
    await until(lambda: first.check_fails is None)
    missed = first.missed_so_far
    await until(lambda: first.missed_so_far > missed)
    first.works.set()
    await crew.go_on()
    await until(lambda: crew.threads() == TWO)
    assert caplog.messages == [ended, ended]


async def test_whoever_finds_a_hang_is_not_alone_when_it_checks_the_task(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may end its thread, as above: nobody would be left."""
    first, there = crew.probes[0], []
    check = first.check

    def counted() -> float:
        there.append(crew.threads().count("npu-probes"))
        return check()

    monkeypatch.setattr(first, "check", counted)
    first.works.clear()
    await until(lambda: first.missed_so_far > 2)
    assert set(there) == {2}


async def test_a_thread_that_the_system_refuses_is_started_later(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start
    refused = []

    def refuse(thread: threading.Thread) -> None:
        refused.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    crew.probes[0].works.clear()
    await until(lambda: len(refused) > 2)
    await crew.go_on(*crew.probes[1:])  # by one alone
    alone = Rounds()
    with pytest.raises(RuntimeError, match="new thread"):  # noqa: SIM117 (it is entered)
        with alone.polling("file", lambda: 1, 1.0, lambda _: None):
            pass
    assert alone._tasks == ()
    monkeypatch.setattr(threading.Thread, "start", start)
    crew.probes[0].works.set()
    await until(lambda: crew.threads() == TWO)
    await crew.go_on()
    assert caplog.messages == []


# Polling of what cannot say that it changed.


async def test_what_a_poll_finds_is_passed_on_once() -> None:
    mine = Rounds()
    there, found = 1, list[int]()
    polls = 0

    def poll() -> int:
        nonlocal polls
        polls += 1
        return there

    with mine.polling("file", poll, 0.01, found.append):
        await until(lambda: polls > 3)
        assert found == [1]
        there = 2
        await until(lambda: len(found) > 1)
        await until(lambda: polls > 6)
    assert found == [1, 2]
    polls = 0
    await asyncio.sleep(0.05)  # more would be wrong, and nothing tells when it is too late for them
    assert polls <= 1  # one may have been under way


async def test_a_poll_that_hangs_finds_nothing_and_keeps_nobody_waiting(crew: Crew) -> None:
    goes_on, found = threading.Event(), list[bool]()
    with crew.rounds.polling("file", lambda: goes_on.wait(LONG), 0.01, found.append):
        await until(lambda: "file" in crew.threads())
        await crew.go_on()
        assert found == []
        goes_on.set()
        await until(lambda: found == [True])


async def test_the_end_is_no_fault(crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    crew.follow()
    await until(lambda: crew.threads() == [])
    assert caplog.messages == []
