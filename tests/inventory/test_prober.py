"""Blocking jobs on a worker thread: none that hangs holds up the others for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from npu_agent.inventory.prober import Job, Prober
from tests.threads import no_thread_stays, ours
from tests.until import until


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging jobs wait for; they end with the test."""
    gate = threading.Event()
    with no_thread_stays():
        yield gate
        gate.set()


async def test_jobs_run_in_order_on_one_thread() -> None:
    ran: list[tuple[int, int]] = []

    def noted(number: int) -> int:
        ran.append((number, threading.get_ident()))
        return number

    prober = Prober()
    for _ in range(2):
        jobs = [Job(partial(noted, n)) for n in range(5)]
        await prober.run(jobs)
        assert [one.result for one in jobs] == list(range(5))
    assert [n for n, _ in ran] == [*range(5), *range(5)]
    assert len({thread for _, thread in ran}) == 1


async def test_a_job_that_hangs_keeps_one_thread_and_the_others_run(gate: threading.Event) -> None:
    prober = Prober(deadline=0.05)
    hung = Job(gate.wait)
    rest = [Job(lambda n=n: n) for n in range(3)]  # type: ignore[misc]
    await prober.run([rest[0], hung, *rest[1:]])
    assert [one.result for one in rest] == [0, 1, 2]
    assert not hung.done
    assert hung.begun
    again = Job(lambda: "next")
    await prober.run([again])
    assert again.result == "next"
    # On a busy machine others may have been late, too; their threads end soon.
    await until(lambda: len(ours()) == 1)
    gate.set()
    await until(lambda: hung.done)
    await until(lambda: not ours())


async def test_jobs_that_all_hang_are_all_begun(gate: threading.Event) -> None:
    """In one batch: not one more with each batch."""
    prober = Prober(deadline=0.05)
    hung = [Job(gate.wait) for _ in range(8)]
    await prober.run(hung)
    assert all(one.begun for one in hung)


async def test_a_cancelled_batch_leaves_a_prober_that_works(gate: threading.Event) -> None:
    prober = Prober(deadline=0.05)
    running = asyncio.create_task(prober.run([Job(gate.wait)]))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    after = Job(lambda: "works")
    await prober.run([after])
    assert after.result == "works"
