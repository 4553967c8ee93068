from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.cordon import cordons, entries, first_ids, unknown
from npu_agent.core.hardware import CardState, Snapshot
from tests.outputs.dra.cards import card

HOST = Snapshot((card("rngd", 0), card("rngd", 3), card("rngd", 4)), complete=True)
ZERO, THREE, FOUR = HOST.cards


def test_a_card_goes_by_name_uuid_and_pci_address_in_any_case() -> None:
    assert THREE.card.uuid
    assert ZERO.card.pci_bus_id
    named = {"NPU4": "a", THREE.card.uuid.upper(): "b", ZERO.card.pci_bus_id: "c"}
    found = cordons(entries(json.dumps(named)), HOST)
    assert found.cards == {FOUR.id: "a", THREE.id: "b", ZERO.id: "c"}  # all may be
    assert not found.wrong


def test_an_entry_that_names_no_card_is_wrong_and_the_rest_counts() -> None:
    found = cordons(entries('{"npu3": "swap fan", "npu9": "", "npu8": ""}'), HOST)
    assert found.cards == {THREE.id: "swap fan"}
    assert not found.wrong
    assert found.lost == {"npu9": "no reason given", "npu8": "no reason given"}
    problem = unknown([*found.lost], HOST)
    assert problem.kind == "CordonUnknown"
    assert problem.facts["unknown"] == ("npu9", "npu8")
    assert problem.facts["here"] == "npu0, npu3, npu4"
    # Before all cards are known nothing is missing.
    assert not cordons({"npu9": ""}, replace(HOST, complete=False)).lost


def renumbered(*cards: CardState) -> Snapshot:
    """The cards with the numbers 0, 3 and 4, in this order."""
    numbered = zip(cards, (0, 3, 4), strict=False)
    return Snapshot(
        tuple(replace(each, card=replace(each.card, index=number)) for each, number in numbered),
        complete=True,
    )


def test_a_cordon_stays_with_the_card_that_its_name_meant_first() -> None:
    named = {"NPU3": "broken", "npu9": "not there", FOUR.id: "by its ID"}
    first = first_ids(named, HOST, {})
    assert first == {"npu3": THREE.id}
    assert cordons(named, HOST, first=first).cards == {THREE.id: "broken", FOUR.id: "by its ID"}
    anew = renumbered(THREE, FOUR)
    assert first_ids(named, anew, first) == first
    found = cordons({"npu3": "broken"}, anew, first=first)
    assert found.cards == {THREE.id: "broken"}
    (wrong,) = found.wrong
    assert (wrong.kind, wrong.facts) == (
        "CordonRenumbered",
        {
            "name": "npu3",
            "meant": THREE.id,
            "now": "npu0",
            "others": FOUR.id,
            "reason": "broken",
        },
    )
    assert not found.lost


def test_the_card_that_a_name_meant_first_may_be_gone() -> None:
    first = {"npu3": THREE.id}
    another_there = cordons({"npu3": "broken"}, renumbered(ZERO, FOUR), first=first)
    assert not another_there.cards
    assert not another_there.lost
    (wrong,) = another_there.wrong
    assert (wrong.kind, wrong.facts["meant"]) == ("CordonOfMissingCard", THREE.id)
    none_there = cordons({"npu3": "broken"}, renumbered(ZERO), first=first)
    assert (none_there.lost, none_there.wrong) == ({"npu3": "broken"}, ())
    elsewhere = cordons({"npu3": "broken"}, renumbered(THREE), first=first)
    assert (elsewhere.cards, elsewhere.lost) == ({THREE.id: "broken"}, {})


def test_no_name_means_a_card_before_all_are_known_nor_one_of_two() -> None:
    assert first_ids(["npu3"], replace(HOST, complete=False), {}) == {}
    host = replace(HOST, cards=(*HOST.cards, card("warboy", 3)))
    assert first_ids(["npu3", "npu4"], host, {}) == {"npu4": FOUR.id}


def test_a_name_of_two_cards_is_none_of_them() -> None:
    twin = card("warboy", 3)
    host = replace(HOST, cards=(*HOST.cards, twin))
    found = cordons({"npu3": "x"}, host)
    assert not found.cards
    (wrong,) = found.wrong
    assert wrong.kind == "CordonAmbiguous"
    assert wrong.facts == {"name": "npu3", "ids": (THREE.id, twin.id)}


@pytest.mark.parametrize(
    ("annotation", "why"),
    [
        ("swap fan", "not JSON"),
        ('["npu3"]', "not a map of cards to reasons"),
        ("[" * 100_000, "not JSON"),
        ("7", "not a map"),
    ],
)
def test_garbage(annotation: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        entries(annotation)
    found = cordons({"npu3": "before"}, HOST, str(caught.value))
    assert found.cards == {THREE.id: "before"}
    (wrong,) = found.wrong
    assert wrong.kind == "CordonUnreadable"
    assert why in str(wrong.facts["error"])


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("swap\nfan \x1b[1m", "swap fan ?[1m"),
        ("", "no reason given"),
        (7, "no text: 7"),
        ("x" * 10_000, "x" * 255 + "…"),
    ],
)
def test_reasons_are_lines(given: object, shown: str) -> None:
    assert entries(json.dumps({"npu3": given})) == {"npu3": shown}


@given(st.text() | st.recursive(st.none() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        named = entries(text)
    except ValueError:
        return
    for wrong in cordons(named, HOST).wrong:
        assert len(str(wrong)) < 600


def test_no_annotation_cordons_no_card() -> None:
    assert entries("") == entries(" ") == entries("{}") == {}
