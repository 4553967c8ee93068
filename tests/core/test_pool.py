"""The devices that DRA offers: their names and taints."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.hardware import CardState, HealthState
from npu_agent.core.offer import Device
from npu_agent.core.pool import Effect, PoolDevice, Taint
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.dra.cards import pool_of

UNHEALTHY = "npu.furiosa.ai/unhealthy"
HELD = "npu.furiosa.ai/held"


def names(*cards: CardState, by_index: bool = False) -> list[str]:
    return [each.name for each in pool_of(*cards, by_index=by_index)]


def taints(*cards: CardState, evict: bool = False) -> list[tuple[Taint, ...]]:
    return [each.taints for each in pool_of(*cards, evict=evict)]


def test_a_device_is_a_whole_card_in_the_order_of_the_cards() -> None:
    cards = [state("warboy", 0), state("rngd", 1), state("warboy", 2)]
    found = pool_of(*cards)
    assert [each.device.card for each in found] == [each.card for each in cards]
    assert [len(each.device.cores) for each in found] == [2, 8, 2]
    assert [each.description.capacity["core"] for each in found] == ["2", "8", "2"]


def test_only_the_families_that_dra_offers_and_no_disabled_card() -> None:
    cards = [state("warboy", 0), state("rngd", 1), state("rngd", 2, id_="E23A-2")]

    def indexes(found: tuple[PoolDevice, ...]) -> list[int]:
        return [each.device.card.index for each in found]

    assert indexes(pool_of(*cards, families={"rngd"})) == [1, 2]
    assert indexes(pool_of(*cards, disabled={"NPU1"})) == [0, 2]
    assert indexes(pool_of(*cards, disabled={"e23a-2"})) == [0, 1]
    assert indexes(pool_of(*cards, families=())) == []


# Names.


def test_a_card_keeps_its_name_when_it_is_renumbered() -> None:
    assert names(state("rngd", 3, id_="E23A7C54-0003")) == ["npu-e23a7c54-0003"]
    assert names(state("rngd", 0, id_="E23A7C54-0003")) == ["npu-e23a7c54-0003"]


IDS = st.lists(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,49}\Z"), max_size=6, unique=True)


@given(IDS, st.booleans())
def test_names_are_dns_labels_and_none_is_there_twice(ids: list[str], by_index: bool) -> None:
    cards = [state("rngd", index, id_=id_) for index, id_ in enumerate(ids)]
    found = names(*cards, by_index=by_index)
    assert len(set(found)) == len(ids)
    for name in found:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
        assert len(name) <= 63


def test_cards_whose_ids_are_one_name_get_names_that_last() -> None:
    one, other = state("rngd", 0, id_="a.b"), state("rngd", 1, id_="A:B")
    found = names(one, other)
    assert [name.rpartition("-")[0] for name in found] == ["npu-a-b", "npu-a-b"]
    assert names(other, one) == found[::-1]


def test_an_id_that_is_too_long_for_a_name_is_cut_and_told_from_others() -> None:
    long = "x" * 80
    found = names(state("rngd", 0, id_=long + "1"), state("rngd", 1, id_=long + "2"))
    assert len(set(found)) == 2
    assert all(len(name) == 63 for name in found)


def test_names_by_index_are_the_vendors() -> None:
    assert names(state("rngd", 0), state("rngd", 11), by_index=True) == ["npu0", "npu11"]


def test_two_families_with_the_same_numbers_have_their_name_before_it() -> None:
    cards = state("warboy", 0), state("rngd", 0), state("rngd", 1)
    assert names(*cards, by_index=True) == ["warboy-npu0", "rngd-npu0", "npu1"]


# Taints.


@pytest.mark.parametrize(("evict", "effect"), [(False, "NoSchedule"), (True, "NoExecute")])
def test_a_sick_card_is_tainted_and_evicts_only_if_asked_to(evict: bool, effect: str) -> None:
    cards = [
        state("rngd", 0),
        state("rngd", 1, health=HealthState.UNHEALTHY),
        state("rngd", 2, health=HealthState.UNKNOWN),
    ]
    assert taints(*cards, evict=evict) == [(), (Taint(key=UNHEALTHY, effect=Effect(effect)),), ()]


def test_a_card_that_lacks_nodes_is_tainted() -> None:
    missing = ("pe0", "pe0-1", "pe0-3")
    assert [[each.key for each in of] for of in taints(state("rngd", 0, missing=missing))] == [
        [UNHEALTHY]
    ]


def test_what_somebody_holds_is_tainted_but_evicts_nobody() -> None:
    def held(device: Device) -> str | None:
        return "a container of Pod a/b has it" if device.card.index == 1 else None

    cards = state("rngd", 0), state("rngd", 1), state("rngd", 2, health=HealthState.UNHEALTHY)
    found = [each.taints for each in pool_of(*cards, held=held, evict=True)]
    assert found == [
        (),
        (Taint(key=HELD, effect=Effect.NO_SCHEDULE),),
        (Taint(key=UNHEALTHY, effect=Effect.NO_EXECUTE),),
    ]
