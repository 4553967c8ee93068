"""CDI specs for people: what is in them, and that they follow the cards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npu_agent.core.hardware import CardState, Health, HealthState, Snapshot
from npu_agent.feed import Feed
from npu_agent.outputs.cdi import host_specs
from npu_agent.outputs.hostcdi import HostCdi
from npu_agent.vendors import CDI_KINDS, REGISTRY
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.until import until

FILE = "furiosa.ai-npu.json"


def state(id_: str, index: int, family: str = "warboy", *, healthy: bool = True) -> CardState:
    made = FAMILIES[family]
    card = made.card(index, product=family, nodes=frozenset(made.nodes(index)))
    kind = HealthState.HEALTHY if healthy else HealthState.UNHEALTHY
    return CardState(id=id_, card=card, health=Health(state=kind, reason="it is so", since=0.0))


def snapshot(*cards: CardState) -> Snapshot:
    return Snapshot(cards, complete=True)


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def devices(found: bytes | None) -> dict[str, Any]:
    return {one["name"]: one["containerEdits"] for one in json.loads(found or b"")["devices"]}


def test_a_card_goes_by_its_id_its_number_and_its_cores() -> None:
    specs = host_specs(snapshot(state("A", 0), state("B", 1, "rngd")), REGISTRY.families, CDI_KINDS)
    found = devices(specs.files[FILE])
    assert {"A", "npu0", "npu0:0-1", "npu0:0", "npu0:1"} <= found.keys()
    assert {"B", "npu1", "npu1:0-3", "npu1:4-7", "npu1:0-1", "npu1:7"} <= found.keys()
    assert found["A"] == found["npu0"]
    assert found["npu0:1"]["env"] == ["NPU_DEVNAME=npu0pe1", "FURIOSA_DEVICES=npu:0:1"]
    nodes = [node["path"] for node in found["npu0:1"]["deviceNodes"]]
    assert "/dev/npu0pe1" in nodes
    assert "/dev/npu0pe0" not in nodes
    assert specs.names[0] == "furiosa.ai/npu=A"
    assert specs.left_out == ()


def test_all_is_the_union_of_the_cards() -> None:
    specs = host_specs(snapshot(state("A", 0), state("B", 1)), REGISTRY.families, CDI_KINDS)
    found = devices(specs.files[FILE])["all"]
    assert "FURIOSA_DEVICES=npu:0:0-1,npu:1:0-1" in found["env"]
    nodes = [node["path"] for node in found["deviceNodes"]]
    assert {"/dev/npu0", "/dev/npu1"} <= set(nodes)
    assert len(nodes) == len(set(nodes))


def test_a_sick_card_and_a_disabled_one_are_left_out_with_the_reason() -> None:
    cards = snapshot(state("A", 0, healthy=False), state("B", 1), state("C", 2))
    specs = host_specs(cards, REGISTRY.families, CDI_KINDS, {"c"})
    found = devices(specs.files[FILE])
    assert found["all"] == found["B"]
    assert not {"A", "npu0", "npu0:0", "C", "npu2"} & found.keys()
    assert specs.left_out == ("npu0: unhealthy: it is so", "npu2: disabled by the config")


def test_a_number_that_two_cards_have_names_neither() -> None:
    specs = host_specs(snapshot(state("A", 0), state("B", 0, "rngd")), REGISTRY.families, CDI_KINDS)
    found = devices(specs.files[FILE])
    assert found.keys() == {"A", "B", "all"}
    assert specs.left_out[0] == "the name npu0: several cards have it; use A"


def test_cores_without_a_node_are_left_out_and_the_others_stay() -> None:
    card = state("A", 0)
    nodes = card.card.nodes - {"npu0pe1"}
    card = replace(card, card=replace(card.card, nodes=nodes))
    found = devices(host_specs(snapshot(card), REGISTRY.families, CDI_KINDS).files[FILE])
    assert "npu0:1" not in found
    assert {"npu0:0", "npu0"} <= found.keys()


def test_no_card_no_file() -> None:
    assert host_specs(snapshot(), REGISTRY.families, CDI_KINDS).files == {FILE: None}


@asynccontextmanager
async def followed(
    cards: Feed[Snapshot], directory: Path, disabled: Feed[frozenset[str]] | None = None
) -> AsyncIterator[HostCdi]:
    cdi = HostCdi(
        snapshots=cards,
        widths=REGISTRY.families,
        kinds=CDI_KINDS,
        disabled=disabled or Feed(frozenset()),
        directory=directory,
    )
    running = asyncio.create_task(cdi.run())
    try:
        yield cdi
    finally:
        running.cancel()


async def test_the_file_follows_the_cards_and_goes_with_the_last(tmp_path: Path) -> None:
    cards, disabled = Feed(Snapshot()), Feed(frozenset[str]())
    file = tmp_path / "cdi" / FILE
    async with followed(cards, file.parent, disabled):
        cards.publish(snapshot(state("A", 0)))
        await until(file.exists)
        cards.publish(snapshot(state("A", 0), state("B", 1)))
        await until(lambda: "B" in devices(file.read_bytes()))
        disabled.publish(frozenset({"npu1"}))
        await until(lambda: "B" not in devices(file.read_bytes()))
        cards.publish(snapshot())
        await until(lambda: not file.exists())


async def test_what_an_agent_before_this_one_wrote_goes_if_there_is_no_card(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{}")
    (tmp_path / "somebody-elses.json").write_text("{}")
    async with followed(Feed(snapshot(state("A", 0, healthy=False))), tmp_path):
        await until(lambda: names(tmp_path) == ["somebody-elses.json"])


async def test_nothing_is_written_or_removed_before_the_cards_are_known(tmp_path: Path) -> None:
    cards: Feed[Snapshot] = Feed(Snapshot())
    async with followed(cards, tmp_path) as cdi:
        await asyncio.sleep(0)
        assert cdi.written is None
        assert not list(tmp_path.iterdir())


async def test_what_could_not_be_written_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cdi"
    directory.write_text("in the way")
    async with followed(Feed(snapshot(state("A", 0))), directory) as cdi:
        await until(lambda: cdi.error is not None)
        assert str(directory) in str(cdi.error)
        directory.unlink()
        await until((directory / FILE).exists)
        await until(lambda: cdi.error is None)
    assert caplog.text.count("the CDI specs cannot be written") == 1
