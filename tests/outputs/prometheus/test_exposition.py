"""The page as it lives: as things are, never half, and never lost to one odd value."""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from npu_agent.core.hardware import CoreRange, Snapshot
from npu_agent.core.ledger import Usage
from npu_agent.core.state import AgentState
from npu_agent.feed import Feed
from npu_agent.outputs.prometheus import cards
from npu_agent.outputs.prometheus.exposition import Exposition, ExpositionSettings
from npu_agent.outputs.prometheus.text import MetricFamily
from npu_agent.vendors.furiosa.metrics import SCHEMAS
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

SETTINGS = ExpositionSettings(schema=SCHEMAS["0.8"], pod_labels=True)
NPU0 = Usage("rngd-0", CoreRange(0, 7), held("rngd-0"))


@dataclass
class Room:
    """A page and all that it follows."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    usages: tuple[Usage, ...] = ()
    broken: bool = False
    """Whether the agent's state cannot be put together."""

    def __post_init__(self) -> None:
        self.page = Exposition(self._state, Feed(SETTINGS))

    def _state(self) -> AgentState:
        if self.broken:
            raise RuntimeError("no")
        return own(
            page_failures=self.page.failures,
            monotonic=time.monotonic(),
            snapshot=self.snapshot,
            usages=self.usages,
        )

    def text(self) -> str:
        return self.page.body(False).decode()


def test_series_come_and_go_with_what_they_describe() -> None:
    room = Room()
    assert 'npu_agent_build_info{version="1.2.3"' in room.text()
    # None before every card was read.
    room.snapshot = Snapshot(cards=(card(index=0),))
    assert "furiosa_npu" not in room.text()
    room.snapshot = snapshot(card(index=0, reading=full_reading()), card(index=1))
    assert {'device="npu0"', 'device="npu1"', 'label="peak"'} == _shown(room)
    room.usages = (NPU0,)
    assert 'pod="train-0"' in room.text()
    room.usages = ()
    assert 'pod="train-0"' not in room.text()
    room.snapshot = snapshot(card(index=0, reading=reading(alive=True)))
    assert {'device="npu0"'} == _shown(room)
    room.snapshot = Snapshot(complete=True)
    assert "furiosa_npu" not in room.text()


def _shown(room: Room) -> set[str]:
    return set(re.findall('device="npu."|label="peak"', room.text()))


def test_figures_of_a_card_that_stopped_answering_go_by_themselves() -> None:
    room, now = Room(), time.monotonic()
    late = now - own().stale_after - 1
    room.snapshot = snapshot(
        card(index=0, reading=reading(late, alive=True)),
        card(index=1, reading=reading(now, alive=True)),
    )
    text = room.text()
    alive = values(parsed(text.encode(), openmetrics=False), "furiosa_npu_alive", "device")
    assert set(alive) == {("npu1",)}
    assert 'furiosa_npu_info{arch="rngd",device="npu0"' in text
    assert 'furiosa_npu_health{arch="rngd",device="npu0"' in text


def test_the_page_has_an_end_in_openmetrics_and_the_process_in_both() -> None:
    room = Room()
    page = room.page.body(True)
    assert page.endswith(b"\n# EOF\n")
    assert page.count(b"# EOF") == 1
    for text in (page.decode(), room.text()):
        assert "\nprocess_open_fds " in text
    assert "# EOF" not in room.text()


def test_a_family_that_fails_is_left_out_logged_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Iterator[Any]:
        yield 1 / 0

    good = cards.families

    def some(schemas: Any, series: cards.Cards) -> tuple[MetricFamily, ...]:
        bad = MetricFamily(name="furiosa_npu_alive", help="Broken.", samples=broken())
        return (bad, *good(schemas, series)[1:])

    room = Room()
    room.snapshot = snapshot(card(index=0, reading=full_reading()))
    monkeypatch.setattr(cards, "families", some)
    for _ in range(3):
        text = room.text()
        assert "furiosa_npu_alive{" not in text
        assert "furiosa_npu_uptime{" in text
    assert 'npu_agent_page_failures_total{family="furiosa_npu_alive"} 3\n' in text
    assert [record.message for record in caplog.records] == [
        "a part of the metrics page is left out"
    ]
    assert caplog.records[0].exc_info is not None
    # It works again, and what fails after that is news.
    monkeypatch.setattr(cards, "families", good)
    assert "\nfuriosa_npu_alive{" in room.text()
    monkeypatch.setattr(cards, "families", some)
    assert "\nfuriosa_npu_alive{" not in room.text()
    assert len(caplog.records) == 2


def test_a_state_that_fails_leaves_the_process_and_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    room = Room(broken=True)
    room.snapshot = snapshot(card())
    text = room.text()
    assert "furiosa_npu_info" not in text
    assert "npu_agent_build_info" not in text
    assert "process_open_fds" in text
    assert room.page.failures == {"state": 1}
    assert room.page.body(True).endswith(b"# EOF\n")
