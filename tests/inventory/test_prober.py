"""Blocking jobs on a worker thread: none that hangs holds up the others for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from npu_agent.inventory.prober import Job, Prober
from tests.until import until


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging jobs wait for; they end with the test."""
    gate = threading.Event()
    STRANGERS.update(threading.enumerate())
    yield gate
    gate.set()
    for thread in ours():
        thread.join(30)
    STRANGERS.clear()


STRANGERS: set[threading.Thread] = set()
"""Threads that hang since the tests of another module."""


def ours() -> list[threading.Thread]:
    """The threads of this test."""
    found = (each for each in threading.enumerate() if each.name.startswith("npu-"))
    return [each for each in found if each not in STRANGERS]


def job(call: Callable[[], Any], name: str = "npu-job") -> Job[Any]:
    return Job(name=name, call=call)


async def test_jobs_run_in_order_on_one_thread() -> None:
    ran: list[tuple[int, threading.Thread]] = []

    def noted(number: int) -> int:
        ran.append((number, threading.current_thread()))
        return number

    prober = Prober()
    for _ in range(2):
        jobs = [job(partial(noted, n)) for n in range(5)]
        await prober.run(jobs)
        assert [one.result for one in jobs] == list(range(5))
    prober.close()
    assert [n for n, _ in ran] == [*range(5), *range(5)]
    assert len({thread for _, thread in ran}) == 1


async def test_results_that_are_expected_wait_for_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop is not woken for them."""
    woken: list[object] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *_: woken.append(1))
    prober = Prober(deadline=30.0)
    same = Job(name="npu-job", call=lambda: "as before", expected="as before")
    await prober.run([same], 0.05)
    assert (same.result, woken) == ("as before", [])
    prober.close()


async def test_a_job_that_hangs_keeps_one_thread_and_the_others_run(gate: threading.Event) -> None:
    prober = Prober(deadline=0.05)
    hung = job(gate.wait, name="npu-hung")
    rest = [job(lambda n=n: n) for n in range(3)]  # type: ignore[misc]
    await prober.run([rest[0], hung, *rest[1:]])
    assert [one.result for one in rest] == [0, 1, 2]
    assert not hung.done
    assert hung.began is not None
    again = job(lambda: "next")
    await prober.run([again])
    assert again.result == "next"
    # On a busy machine others may have been late, too; their threads end soon.
    await until(lambda: sorted(each.name for each in ours()) == ["npu-hung", "npu-probes"])
    gate.set()
    await until(lambda: hung.done)
    await until(lambda: "npu-hung" not in [thread.name for thread in ours()])
    prober.close()


async def test_jobs_that_all_hang_are_all_begun(gate: threading.Event) -> None:
    """In one batch: not one more with each batch."""
    prober = Prober(deadline=0.05)
    hung = [job(gate.wait, name=f"npu-hung{n}") for n in range(8)]
    await prober.run(hung)
    assert all(one.began is not None for one in hung)
    prober.close()


async def test_a_cancelled_batch_leaves_a_prober_that_works(gate: threading.Event) -> None:
    prober = Prober(deadline=0.05)
    running = asyncio.create_task(prober.run([job(gate.wait)]))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    prober.close()
    after = job(lambda: "works")
    await prober.run([after])
    assert after.result == "works"
    prober.close()
