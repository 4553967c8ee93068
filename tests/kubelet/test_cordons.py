"""What is on the disk of cordons; how they are followed is in tests/test_agent_cordons.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from npu_agent.core.hardware import Snapshot
from npu_agent.feed import Feed
from npu_agent.kubelet.cordons import FILE, CordonStore, last_cordons
from npu_agent.supervise import background
from tests.outputs.dra.cards import card
from tests.until import first, until

HOST = Snapshot((card("rngd", 0), card("rngd", 1)), complete=True)
NPU0, NPU1 = (state.id for state in HOST.cards)


@asynccontextmanager
async def running(
    directory: Path,
    annotation: Feed[str | None],
    host: Snapshot = HOST,
    disabled: frozenset[str] = frozenset(),
) -> AsyncIterator[CordonStore]:
    store = CordonStore(annotation, Feed(host), Feed(disabled), directory, start=0.0)
    async with background(store.run()):
        yield store


async def test_the_disk_has_the_last_good_annotation(tmp_path: Path) -> None:
    annotation: Feed[str | None] = Feed('{"npu1": "swap fan"}')
    async with running(tmp_path, annotation):
        await until((tmp_path / FILE).exists)
        annotation.publish("{npu1")
        annotation.publish("{npu1, npu0}")
        assert last_cordons(tmp_path, HOST).cards == {NPU1: "swap fan"}
    async with running(tmp_path, Feed(None)) as store:
        assert store.cards.value == {NPU1: "swap fan"}
    async with running(tmp_path, Feed("")) as store:
        await first(store.cards, lambda now: not now)
        await until(lambda: not (tmp_path / FILE).exists())


async def test_a_name_means_the_card_that_it_meant_first(tmp_path: Path) -> None:
    """Over a restart with which the cards are numbered anew."""
    anew = Snapshot(
        tuple(
            replace(state, card=replace(state.card, index=1 - state.card.index))
            for state in HOST.cards
        ),
        complete=True,
    )
    annotation: Feed[str | None] = Feed('{"NPU1": "broken"}')
    names = frozenset({"npu0", "npu9", HOST.cards[0].id})
    async with running(tmp_path, annotation, disabled=names):
        await until((tmp_path / FILE).exists)
    async with running(tmp_path, annotation, anew, names) as store:
        assert store.cards.value == {NPU1: "broken"} == last_cordons(tmp_path, anew).cards
        await store.settled()
        assert store.state.value.first_ids == {"npu0": HOST.cards[0].id, "npu1": NPU1}
        annotation.publish("")
        await first(store.cards, lambda cards: not cards)
        assert store.state.value.first_ids == {"npu0": HOST.cards[0].id}
        annotation.publish('{"npu1": "this one now"}')
        assert await first(store.cards, len) == {HOST.cards[0].id: "this one now"}


@pytest.mark.parametrize("content", [b"", b"[]"])
async def test_a_damaged_file_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert not last_cordons(tmp_path, HOST).cards
    async with running(tmp_path, Feed('{"npu1": "x"}')) as store:
        await first(store.cards, len)


async def test_a_disk_that_cannot_be_written_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).mkdir()  # in the way
    (tmp_path / FILE / "x").touch()
    async with running(tmp_path, Feed('{"npu1": "x"}')) as store:
        assert await first(store.cards, len) == {NPU1: "x"}
        await until(lambda: "cannot write the cordons to disk" in caplog.text)
        (tmp_path / FILE / "x").unlink()
        (tmp_path / FILE).rmdir()
        await until((tmp_path / FILE).is_file)
    assert caplog.text.count("cannot write the cordons") == 1
