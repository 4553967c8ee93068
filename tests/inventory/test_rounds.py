import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from npu_agent.inventory import rounds
from npu_agent.inventory.rounds import Rounds, Task
from tests.until import until

LONG = 30.0


class Probe(Task):
    """Done each 10 ms, until it is told to hang."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.done = self.missed_so_far = 0
        self.threads: set[threading.Thread] = set()
        self.works = threading.Event()
        self.works.set()

    def do(self) -> None:
        self.threads.add(threading.current_thread())
        self.works.wait(LONG)
        self.done += 1
        self.due = rounds.next_moment(0.01)

    def check(self) -> float:
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
        self.before = set(threading.enumerate())
        self.probes = [Probe(f"card-{number}") for number in range(count)]
        self.rounds = Rounds(self.changed)
        self.rounds.follow(tuple(self.probes))
        self.rounds.start()

    def changed(self) -> None:
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
    await until(lambda: crew.threads() == ["npu-probes", "npu-watchdog"])
    yield crew
    for probe in crew.probes:
        probe.works.set()
    crew.rounds.end()
    await until(lambda: crew.threads() == [])


async def test_one_thread_makes_the_rounds(crew: Crew) -> None:
    await crew.go_on()
    assert len(set[threading.Thread]().union(*(probe.threads for probe in crew.probes))) == 1
    assert crew.threads() == ["npu-probes", "npu-watchdog"]


async def test_the_others_do_not_wait_for_the_deadline_of_one_that_hangs(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "READ_DEADLINE", 10 * LONG)
    first, *others = crew.probes
    first.works.clear()
    await until(lambda: crew.threads() == ["card-0", "npu-probes", "npu-watchdog"])
    await crew.go_on(*others)
    assert first.missed_so_far == 0
    first.works.set()
    await crew.go_on()
    await until(lambda: crew.threads() == ["npu-probes", "npu-watchdog"])


async def test_several_that_hang_together_are_found_together(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one after the other, each a while later."""
    monkeypatch.setattr(rounds, "_PATIENCE", 0.5)
    watchdogs = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        if thread.name == "npu-watchdog":
            watchdogs.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    with crew.rounds._lock:  # all at the same moment
        for probe in crew.probes[:3]:
            probe.works.clear()
    hang = ["card-0", "card-1", "card-2"]
    await until(lambda: crew.threads() == [*hang, "npu-probes", "npu-watchdog"])
    await crew.go_on(crew.probes[3])
    assert len(watchdogs) == 1  # one took over
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


async def test_one_that_is_left_out_while_it_hangs_is_not_done_again(crew: Crew) -> None:
    first, *others = crew.probes
    first.works.clear()
    await until(lambda: "card-0" in crew.threads())
    crew.rounds.follow(tuple(others))
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
    late = Probe("late")
    late.due = time.monotonic() + 10 * LONG
    crew.rounds.follow((late,))
    done = -1
    while done < (done := sum(probe.done for probe in crew.probes)):  # they rest by now
        await asyncio.sleep(0.05)
    assert late.done == 0
    late.due = 0.0
    crew.rounds.wake()
    await crew.go_on(late)
