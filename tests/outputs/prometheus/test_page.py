"""The page as it lives: as things are, never half, and never lost to one odd value."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from npu_agent.core.hardware import CoreRange, Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.state import AgentState, stale_after
from npu_agent.feed import Feed
from npu_agent.outputs.prometheus import cards, process
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

SETTINGS = Settings(schemas=(SCHEMAS["0.8"],), pod_labels=True, interval=5.0)
NPU0 = Usage("rngd-0", CoreRange(0, 7), held("rngd-0"))


@dataclass
class Room:
    """A page and all that it follows."""

    snapshots: Feed[Snapshot] = field(default_factory=lambda: Feed(Snapshot()))
    holdings: Feed[tuple[Usage, ...]] = field(default_factory=lambda: Feed(()))
    settings: Feed[Settings] = field(default_factory=lambda: Feed(SETTINGS))
    own: Callable[[], AgentState] = own
    keep: float = 0.0

    def __post_init__(self) -> None:
        self.page = Page(
            snapshots=self.snapshots,
            holdings=self.holdings,
            settings=self.settings,
            hostname="node-1",
            state=self._gather,
            keep=self.keep,
        )

    def _gather(self) -> AgentState:
        return self.own()

    async def text(self) -> str:
        return (await self.page.body(openmetrics=False)).decode()


async def test_series_come_and_go_with_what_they_describe() -> None:
    room = Room()
    assert "furiosa_npu" not in await room.text()
    assert 'npu_agent_build_info{version="1.2.3"' in await room.text()
    room.snapshots.publish(snapshot(card(index=0, reading=full_reading()), card(index=1)))
    text = await room.text()
    assert 'device="npu0"' in text
    assert 'device="npu1"' in text
    assert 'label="peak"' in text
    room.holdings.publish((NPU0,))
    assert 'pod="train-0"' in await room.text()
    room.holdings.publish(())
    assert 'pod="train-0"' not in await room.text()
    room.snapshots.publish(snapshot(card(index=0, reading=reading(alive=True))))
    text = await room.text()
    assert 'device="npu1"' not in text
    assert 'label="peak"' not in text
    room.snapshots.publish(Snapshot(complete=True))
    assert "furiosa_npu" not in await room.text()


async def test_a_change_of_config_is_followed() -> None:
    room = Room()
    room.snapshots.publish(snapshot(card(reading=full_reading())))
    room.holdings.publish((NPU0,))
    text = await room.text()
    assert 'label="peak"} 45500\n' in text
    assert text.count("train-0") > 1
    room.settings.publish(replace(SETTINGS, schemas=(SCHEMAS["2025"],)))
    assert 'label="peak"} 45.5\n' in await room.text()
    room.settings.publish(replace(SETTINGS, pod_labels=False))
    assert (await room.text()).count("train-0") == 1  # in _assigned


async def test_no_card_is_shown_before_every_card_was_read() -> None:
    room = Room()
    room.snapshots.publish(Snapshot(cards=(card(index=0),)))
    assert "furiosa_npu" not in await room.text()
    room.snapshots.publish(snapshot(card(index=0), card(index=1)))
    text = await room.text()
    assert 'device="npu0"' in text
    assert 'device="npu1"' in text


async def test_figures_of_a_card_that_stopped_answering_go_by_themselves() -> None:
    room, now = Room(), time.monotonic()
    late = now - stale_after(SETTINGS.interval) - 1
    room.snapshots.publish(
        snapshot(
            card(index=0, reading=reading(late, alive=True)),
            card(index=1, reading=reading(now, alive=True)),
        )
    )
    text = await room.text()
    alive = values(parsed(text.encode(), openmetrics=False), "furiosa_npu_alive", "device")
    assert set(alive) == {("npu1",)}
    assert 'furiosa_npu_info{arch="rngd",device="npu0"' in text
    assert 'furiosa_npu_health{arch="rngd",device="npu0"' in text


@pytest.mark.parametrize("cards_there", [False, True])
async def test_every_form_says_the_same(cards_there: bool) -> None:
    room = Room()
    if cards_there:
        room.snapshots.publish(snapshot(card(reading=full_reading())))
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


async def test_the_page_is_made_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def counted() -> AgentState:
        nonlocal asked
        asked += 1
        return own(restarts={"asked": asked})

    room = Room(own=counted, keep=1.0)
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
    room = Room()
    room.own = lambda: own(page_failures=room.page.failures)
    room.snapshots.publish(snapshot(card(index=0, reading=full_reading())))

    def told() -> list[logging.LogRecord]:
        name = "npu_agent.outputs.prometheus.page"
        return [record for record in caplog.records if record.name == name]

    monkeypatch.setattr(cards, "definitions", lambda _: some)
    for _ in range(3):
        text = await room.text()
        assert "furiosa_npu_alive" not in text.replace('family="furiosa_npu_alive"', "")
        assert "furiosa_npu_uptime{" in text
    assert 'npu_agent_page_failures_total{family="furiosa_npu_alive"} 3\n' in text
    assert [record.message for record in told()] == ["a part of the metrics page is left out"]
    assert told()[0].exc_info is not None
    # It works again, and what fails after that is news.
    monkeypatch.setattr(cards, "definitions", good)
    assert "\nfuriosa_npu_alive{" in await room.text()
    monkeypatch.setattr(cards, "definitions", lambda _: some)
    assert "\nfuriosa_npu_alive{" not in await room.text()
    assert len(told()) == 2


@pytest.mark.parametrize("what", ["cards", "own", "process"])
async def test_a_part_that_fails_costs_no_other(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.ERROR)
    room = Room()

    def broken() -> Any:
        raise RuntimeError("no")

    room.snapshots.publish(snapshot(card()))
    match what:
        case "cards":
            monkeypatch.setattr(cards, "shown", broken)
        case "own":
            room.own = broken
        case "process":
            monkeypatch.setattr(process, "this_process", broken)
    text = await room.text()
    assert ("furiosa_npu_info" in text) == (what != "cards")
    assert ("npu_agent_build_info" in text) == (what != "own")
    assert ("process_open_fds" in text) == (what != "process")
    assert room.page.failures == {what: 1}
    assert (await room.page.body(openmetrics=True)).endswith(b"# EOF\n")
