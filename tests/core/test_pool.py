"""The devices that DRA offers: their names and taints."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npu_agent.core.hardware import CardState, CoreRange, HealthState
from npu_agent.core.offer import Device
from npu_agent.core.plan import expressible
from npu_agent.core.pool import Effect, PoolDevice, Taint, devices_by_name
from npu_agent.core.state import COUNTERS, INFORMATIVE
from npu_agent.core.trends import TrendKind
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.dra.cards import pool_of

UNHEALTHY = "npu.furiosa.ai/unhealthy"
HELD = "npu.furiosa.ai/held"


def names(*cards: CardState, by_index: bool = False) -> list[str]:
    return [each.name for each in pool_of(*cards, by_index=by_index)]


def taints(*cards: CardState, evict: bool = False) -> list[tuple[Taint, ...]]:
    return [each.taints for each in pool_of(*cards, evict=evict)]


def test_the_family_that_the_vendor_puts_first_comes_first_with_all_its_parts() -> None:
    families = ("warboy", "rngd", "warboy", "rngd")
    cards = [state(family, index, id_=f"E-{index}") for index, family in enumerate(families)]
    for partitions in (False, True):
        found = pool_of(*cards, partitions=partitions)
        assert list(dict.fromkeys(each.device.card.index for each in found)) == [1, 3, 0, 2]


# Names.


def test_a_card_keeps_its_name_when_it_is_renumbered() -> None:
    assert names(state("rngd", 3, id_="E23A7C54-0003")) == ["npu-e23a7c54-0003"]
    assert names(state("rngd", 0, id_="E23A7C54-0003")) == ["npu-e23a7c54-0003"]


IDS = st.lists(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,49}\Z"), max_size=6, unique=True)


def test_cards_whose_ids_are_one_name_get_names_that_last() -> None:
    one, other = state("rngd", 0, id_="a.b"), state("rngd", 1, id_="A:B")
    found = names(one, other)
    assert [name.rpartition("-")[0] for name in found] == ["npu-a-b", "npu-a-b"]
    assert names(other, one) == found[::-1]


# Taints.


@pytest.mark.parametrize(("evict", "effect"), [(False, "NoSchedule"), (True, "NoExecute")])
def test_an_unhealthy_card_is_tainted_and_evicts_only_if_asked_to(evict: bool, effect: str) -> None:
    cards = [
        state("rngd", 0),
        state("rngd", 1, health=HealthState.UNHEALTHY),
        state("rngd", 2, health=HealthState.UNKNOWN),
    ]
    assert taints(*cards, evict=evict) == [(), (Taint(key=UNHEALTHY, effect=Effect(effect)),), ()]


def test_a_taint_for_information_has_no_effect() -> None:
    known = state("rngd", 0)
    degraded = {known.id: {TrendKind.LINK, TrendKind.HOT}}
    (device,) = pool_of(known, degraded=degraded)
    assert [taint.key for taint in device.taints] == ["npu.furiosa.ai/hot", "npu.furiosa.ai/link"]
    assert {taint.effect for taint in device.taints} == {Effect.NONE}
    assert not device.barred
    (sick,) = pool_of(
        replace(known, health=state(health=HealthState.UNHEALTHY).health), degraded=degraded
    )
    assert sick.barred
    (device,) = expressible([sick], {INFORMATIVE})
    assert device.taints == (Taint(key=UNHEALTHY, effect=Effect.NO_SCHEDULE),)


def test_a_held_device_is_tainted_but_evicts_no_pod() -> None:
    def held(device: Device) -> str | None:
        return "a container of Pod a/b has it" if device.card.index == 1 else None

    cards = state("rngd", 0), state("rngd", 1), state("rngd", 2, health=HealthState.UNHEALTHY)
    found = [each.taints for each in pool_of(*cards, held=held, evict=True)]
    assert found == [
        (),
        (Taint(key=HELD, effect=Effect.NO_SCHEDULE),),
        (Taint(key=UNHEALTHY, effect=Effect.NO_EXECUTE),),
    ]


# Parts of cards.


def parts(*cards: CardState, **options: Any) -> dict[str, PoolDevice]:
    return {each.name: each for each in pool_of(*cards, partitions=True, **options)}


def test_a_card_is_offered_in_every_width_that_it_has_nodes_for() -> None:
    found = parts(state("rngd", 0, id_="R"), state("warboy", 1, id_="W"))
    assert list(found) == [
        "npu-r",
        *("npu-r-cores-0-3", "npu-r-cores-4-7"),
        *("npu-r-cores-0-1", "npu-r-cores-2-3", "npu-r-cores-4-5", "npu-r-cores-6-7"),
        *(f"npu-r-cores-{core}" for core in range(8)),
        "npu-w",
        *("npu-w-cores-0", "npu-w-cores-1"),
    ]
    attributes = [found[name].description.attributes for name in ("npu-r", "npu-r-cores-4-7")]
    assert [(one["type"], one["cores"]) for one in attributes] == [("card", 8), ("cores", 4)]
    capacity = {len(one.device.cores): one.description.capacity for one in found.values()}
    assert capacity[4] == {"core": "4", "memory": "24Gi"}
    assert {one.counters.name for one in found.values() if one.counters} == {"npu-r", "npu-w"}
    assert found["npu-r-cores-7"].counters == found["npu-r"].counters


def test_whole_cards_are_as_if_nothing_were_cut() -> None:
    cards = [state("rngd", 0), state("warboy", 1, health=HealthState.UNHEALTHY)]
    assert expressible(parts(*cards).values(), COUNTERS) == pool_of(*cards)


def test_parts_by_index() -> None:
    cards = state("warboy", 0), state("rngd", 0), state("rngd", 1)
    found = list(parts(*cards, by_index=True))
    assert found[0] == "rngd-npu0"
    assert found[-3:] == ["warboy-npu0", "warboy-npu0-cores-0", "warboy-npu0-cores-1"]
    assert "npu1-cores-7" in found


@given(IDS, st.booleans())
@example(["X", "X-cores-0-3"], False)
@example(["x" * 58 + "1", "x" * 58 + "2"], False)
@example(["x" * 50 + "1", "x" * 50 + "2"], False)
def test_names_of_parts_are_dns_labels_and_each_device_has_its_own(
    ids: list[str], by_index: bool
) -> None:
    cards = [state("rngd", index, id_=id_) for index, id_ in enumerate(ids)]
    found = pool_of(*cards, partitions=True, by_index=by_index)
    assert len({one.name for one in found}) == len(found) == 15 * len(ids)
    known = devices_by_name(cards)
    for one in found:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", one.name)
        assert len(one.name) <= 63
        assert known[one.name] == (one.device.card_id, one.device.cores)
    # Whole cards are called as they are where nothing is cut.
    whole = [one.name for one in found if not one.is_part]
    assert whole == names(*cards, by_index=by_index)


def tainted(found: dict[str, PoolDevice]) -> set[str]:
    return {name.partition("-cores-")[2] or "card" for name, one in found.items() if one.taints}


def test_a_core_without_a_node_taints_the_devices_that_need_it() -> None:
    found = parts(state("rngd", 0, id_="R", missing=("pe4", "pe4-5", "pe4-7")))
    assert tainted(found) == {"card", "4-7", "4-5", "4"}
    assert {key.key for one in found.values() for key in one.taints} == {UNHEALTHY}


def test_held_cores_taint_the_devices_that_overlap() -> None:
    def held(device: Device) -> str | None:
        return "Pod a/b has it" if device.cores.overlaps(CoreRange(2, 3)) else None

    found = parts(state("rngd", 0, id_="R"), held=held)
    assert tainted(found) == {"card", "0-3", "2-3", "2", "3"}
    assert {taint.key for one in found.values() for taint in one.taints} == {HELD}
