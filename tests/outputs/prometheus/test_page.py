"""The page as it lives: made anew on change, never half, and never lost to one odd value."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from npu_agent.core.hardware import CoreRange, Snapshot
from npu_agent.core.ledger import Holding
from npu_agent.core.state import AgentState
from npu_agent.feed import Feed
from npu_agent.outputs.prometheus import cards, page, process
from npu_agent.outputs.prometheus.page import Page, Settings
from npu_agent.outputs.prometheus.text import Definition
from npu_agent.vendors.furiosa.metrics import SCHEMAS
from tests.outputs.helpers import RESOURCE
from tests.outputs.prometheus.helpers import (
    card,
    full_reading,
    held,
    own,
    parsed,
    reading,
    snapshot,
    values,
)
from tests.until import until

DEADLINE = 20.0
"""Seconds; guards against hanging and measures nothing."""
SETTINGS = Settings(schemas=(SCHEMAS["0.8"],), pod_labels=True, interval=5.0)
NPU0 = Holding("rngd-0", CoreRange(0, 7), held("rngd-0"))


@dataclass
class Room:
    """A page and all that it follows."""

    snapshots: Feed[Snapshot] = field(default_factory=lambda: Feed(Snapshot()))
    holdings: Feed[tuple[Holding, ...]] = field(default_factory=lambda: Feed(()))
    settings: Feed[Settings] = field(default_factory=lambda: Feed(SETTINGS))
    own: Callable[[], AgentState] = own

    def __post_init__(self) -> None:
        self.page = Page(
            snapshots=self.snapshots,
            holdings=self.holdings,
            settings=self.settings,
            hostname="node-1",
            state=self._gather,
        )

    def _gather(self) -> AgentState:
        return self.own()

    async def text(self) -> str:
        return (await self.page.body(openmetrics=False)).decode()

    async def until(self, condition: Callable[[str], bool]) -> str:
        """The first page from now on that fulfils `condition`."""

        async def right() -> str:
            return text if condition(text := await self.text()) else ""

        return await until(right, "a page that is right")

    async def shows(self, *words: str) -> str:
        return await self.until(lambda text: all(word in text for word in words))

    async def hides(self, *words: str) -> str:
        return await self.until(lambda text: not any(word in text for word in words))


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_AT_LEAST", 0.005)


@asynccontextmanager
async def running(**values: Any) -> AsyncIterator[Room]:
    room = Room(**values)
    task = asyncio.create_task(room.page.run())
    try:
        yield room
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """The Snapshots of which the cards' part was made."""
    seen: list[Snapshot] = []
    shown = cards.shown

    def noted(snapshot: Snapshot, *arguments: Any, **keywords: Any) -> cards.Cards:
        seen.append(snapshot)
        return shown(snapshot, *arguments, **keywords)

    monkeypatch.setattr(cards, "shown", noted)
    return seen


async def test_series_come_and_go_with_what_they_describe() -> None:
    async with running() as room:
        assert "furiosa_npu" not in await room.text()
        assert 'npu_agent_build_info{version="1.2.3"' in await room.text()
        both = snapshot(card(index=0, reading=full_reading()), card(index=1))
        room.snapshots.publish(both)
        text = await room.shows('device="npu0"', 'device="npu1"')
        assert 'label="peak"' in text
        room.holdings.publish((NPU0,))
        await room.shows('pod="train-0"')
        room.holdings.publish(())
        await room.hides('pod="train-0"')
        room.snapshots.publish(snapshot(card(index=0, reading=reading(alive=True))))
        await room.hides('device="npu1"', 'label="peak"')
        room.snapshots.publish(Snapshot(complete=True))
        await room.hides("furiosa_npu")


async def test_a_change_of_config_is_followed() -> None:
    async with running() as room:
        room.snapshots.publish(snapshot(card(reading=full_reading())))
        room.holdings.publish((NPU0,))
        await room.shows('label="peak"} 45500\n', 'pod="train-0"')
        room.settings.publish(replace(SETTINGS, schemas=(SCHEMAS["2025"],)))
        await room.shows('label="peak"} 45.5\n')
        room.settings.publish(replace(SETTINGS, pod_labels=False))
        await room.until(lambda text: text.count("train-0") == 1)  # in _assigned


async def test_nothing_is_shown_before_every_card_was_read(renderings: list[Snapshot]) -> None:
    async with running() as room:
        room.snapshots.publish(Snapshot(cards=(card(index=0),)))
        for turn in range(1, 4):
            assert "furiosa_npu" not in await room.text()
            room.holdings.publish((replace(NPU0, card_id=f"rngd-{turn}"),))
            await asyncio.sleep(0.005)
        whole = snapshot(card(index=0), card(index=1))
        room.snapshots.publish(whole)
        text = await room.shows("furiosa_npu_info")
        assert 'device="npu1"' in text
    assert renderings == [whole]


async def test_without_a_scraper_nothing_is_rendered(
    renderings: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def change(*indices: int) -> None:
        for index in indices:
            room.snapshots.publish(snapshot(card(index=index)))
            await asyncio.sleep(0.02)

    async with running() as room:
        await change(0, 1, 2)
        assert renderings == []
        assert 'device="npu2"' in await room.text()  # the first request is answered all the same
        await change(3)
        assert len(renderings) == 2  # and the next one finds it ready
        monkeypatch.setattr(page, "_ASKED_FOR", -1.0)  # the scraper has gone
        await change(4, 5, 6)
        assert len(renderings) == 2
        assert 'device="npu6"' in await room.text()


async def test_readers_who_come_together_after_a_quiet_time_all_get_the_present_page(
    renderings: list[Snapshot],
) -> None:
    async with running() as room:
        for index in (1, 2):
            room.snapshots.publish(snapshot(card(index=index)))
            await asyncio.sleep(0.01)
        for text in await asyncio.gather(*(room.text() for _ in range(5))):
            assert 'device="npu2"' in text
    assert len(renderings) == 1


async def test_the_same_is_not_made_twice(renderings: list[Snapshot]) -> None:
    async with running() as room:
        room.holdings.publish((NPU0,))
        room.snapshots.publish(snapshot(card()))
        await room.shows("furiosa_npu_info")
        for _ in range(5):  # the kubelet was asked, and said what it had said before
            room.holdings.publish((replace(NPU0),))
            await asyncio.sleep(0.005)
        room.snapshots.publish(snapshot(card(index=7)))
        await room.shows('device="npu7"')
    assert len(renderings) == 2


async def test_many_changes_are_one_page(
    renderings: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_AT_LEAST", DEADLINE)
    async with running() as room:
        room.snapshots.publish(snapshot(card(index=0)))
        await room.shows('device="npu0"')
        room.snapshots.publish(snapshot(card(index=1)))
        await room.shows('device="npu1"')
        for index in range(2, 20):
            room.snapshots.publish(snapshot(card(index=index)))
            await asyncio.sleep(0)
    assert len(renderings) == 2


async def test_figures_of_a_card_that_stopped_answering_go_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "stale_after", lambda _: 0.5)
    now = time.monotonic()
    late = card(index=0, reading=reading(now, alive=True))
    async with running() as room:
        room.snapshots.publish(
            snapshot(late, card(index=1, reading=reading(now + 900, alive=True)))
        )
        await room.until(lambda text: text.count("\nfuriosa_npu_alive{") == 2)
        text = await room.until(lambda text: text.count("\nfuriosa_npu_alive{") == 1)
    assert time.monotonic() >= now + 0.5
    alive = values(parsed(text.encode(), openmetrics=False), "furiosa_npu_alive", "device")
    assert set(alive) == {("npu1",)}
    assert 'furiosa_npu_info{arch="rngd",device="npu0"' in text
    assert 'furiosa_npu_health{arch="rngd",device="npu0"' in text


@pytest.mark.parametrize("cards_there", [False, True])
async def test_every_form_says_the_same(cards_there: bool) -> None:
    async with running() as room:
        if cards_there:
            room.snapshots.publish(snapshot(card(reading=full_reading())))
            await room.shows("furiosa_npu_info")
        plain = await room.page.body(openmetrics=False)
        openmetrics = await room.page.body(openmetrics=True)
    assert plain.count(b"# EOF") == 0
    assert openmetrics.count(b"# EOF") == 1
    assert openmetrics.endswith(b"\n# EOF\n")
    told = [
        values(parsed(plain, openmetrics=False), "npu_agent_registered", "resource"),
        values(parsed(openmetrics, openmetrics=True), "npu_agent_registered", "resource"),
    ]
    assert told[0] == told[1] == {(RESOURCE,): 1}


async def test_own_part_is_made_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def counted() -> AgentState:
        nonlocal asked
        asked += 1
        return own(restarts={"asked": asked})

    room = Room(own=counted)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert 'npu_agent_part_restarts_total{part="asked"} 1\n' in await room.text()
    now += 0.9
    assert 'npu_agent_part_restarts_total{part="asked"} 1\n' in await room.text()
    now += 0.2
    assert 'npu_agent_part_restarts_total{part="asked"} 2\n' in await room.text()
    assert asked == 2


async def test_the_process_is_on_the_page() -> None:
    text = await Room().text()
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert f"\nprocess_{name} " in text


async def test_a_family_that_fails_is_left_out_told_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: cards.Cards) -> Any:
        raise ZeroDivisionError("odd value")

    bad: Definition[cards.Cards] = Definition(
        name="furiosa_npu_alive", help="Broken.", samples=broken
    )
    good = cards.definitions
    some = (bad, *good((SCHEMAS["0.8"],))[1:])
    monkeypatch.setattr(cards, "definitions", lambda _: some)
    room = Room()
    room.own = lambda: own(page_failures=room.page.failures)
    task = asyncio.create_task(room.page.run())
    for index in (0, 1, 2):
        room.snapshots.publish(snapshot(card(index=index, reading=full_reading())))
        text = await room.shows(f'device="npu{index}"')
        assert "furiosa_npu_alive" not in text.replace('family="furiosa_npu_alive"', "")
        assert "furiosa_npu_uptime{" in text
    room.page._own.clear()
    assert 'npu_agent_page_failures_total{family="furiosa_npu_alive"} 3\n' in await room.text()
    said = [
        record for record in caplog.records if record.name == "npu_agent.outputs.prometheus.page"
    ]
    assert [record.message for record in said] == ["a part of the metrics page is left out"]
    assert said[0].exc_info is not None
    # It works again, and what fails after that is news.
    monkeypatch.setattr(cards, "definitions", good)
    room.snapshots.publish(snapshot(card(index=3, reading=full_reading())))
    await room.shows("\nfuriosa_npu_alive{")
    monkeypatch.setattr(cards, "definitions", lambda _: some)
    room.snapshots.publish(snapshot(card(index=4, reading=full_reading())))
    await room.hides("\nfuriosa_npu_alive{")
    said = [
        record for record in caplog.records if record.name == "npu_agent.outputs.prometheus.page"
    ]
    assert len(said) == 2
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_cards_that_cannot_be_shown_do_not_stay_as_they_were(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as room:
        room.snapshots.publish(snapshot(card()))
        await room.shows("furiosa_npu_info")

        def broken(*_: Any, **__: Any) -> Any:
            raise KeyError("nonsense")

        with monkeypatch.context() as patch:
            patch.setattr(cards, "shown", broken)
            room.snapshots.publish(snapshot(card(index=1)))
            await room.hides("furiosa_npu")
        assert room.page.failures["cards"] == 1
        room.snapshots.publish(snapshot(card(index=2)))
        await room.shows('device="npu2"')
    assert "a part of the metrics page is left out" in caplog.text


@pytest.mark.parametrize("what", ["own", "process"])
async def test_own_part_that_fails_costs_no_other(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.ERROR)
    room = Room()

    def broken() -> Any:
        raise RuntimeError("no")

    if what == "own":
        room.own = broken
    else:
        monkeypatch.setattr(process, "this_process", broken)
    text = await room.text()
    assert ("npu_agent_build_info" in text) == (what != "own")
    assert ("process_open_fds" in text) == (what != "process")
    assert room.page.failures == {what: 1}
    assert (await room.page.body(openmetrics=True)).endswith(b"# EOF\n")
