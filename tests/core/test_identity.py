import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.hardware import Card, CoreRange
from npu_agent.core.identity import identify, remember
from npu_agent.core.offer import device_id
from npu_agent.vendors.furiosa.families import FAMILIES

Claims = tuple[str | None, str | None, str | None]
"""What a card says of itself: its UUID, serial number and PCI address."""


def warboy(index: int, uuid: str | None, serial: str | None, pci: str | None) -> Card:
    return FAMILIES["warboy"].card(
        index, product="warboy", uuid=uuid, serial=serial, pci_bus_id=pci
    )


IDENTITY = st.one_of(st.none(), st.sampled_from([*string.ascii_uppercase[:4], "warboy-0"]))
CLAIMS = st.lists(st.tuples(IDENTITY, IDENTITY, IDENTITY), max_size=6)


@given(CLAIMS)
def test_ids_do_not_depend_on_the_order_or_on_other_cards(
    claims: list[Claims],
) -> None:
    cards = [warboy(at, *claim) for at, claim in enumerate(claims)]
    expected = dict(zip(cards, identify(tuple(cards)), strict=True))
    cards.reverse()
    stranger = warboy(99, "stranger", None, None)
    assert dict(zip(cards, identify((stranger, *cards))[1:], strict=True)) == expected


TEXTS = st.one_of(
    st.none(), st.sampled_from(["A", "B", "A_cores_0", "A_cores_0-1", "B_cores_1", "warboy-0"])
)
PLACES = st.lists(st.tuples(TEXTS, TEXTS, st.sampled_from(["P0", "P1", "P2", None])), max_size=4)


def device_ids(id_: str) -> set[str]:
    ranges = [CoreRange(0, 0), CoreRange(1, 1), CoreRange(0, 1)]
    return {id_, *(device_id(id_, cores) for cores in ranges)}


@given(st.lists(PLACES, min_size=1, max_size=4))
def test_ids_stay_and_no_two_cards_share_a_device(moments: list[list[Claims]]) -> None:
    """Whatever cards say from moment to moment, and whoever comes and goes."""
    known: dict[str, frozenset[str]] = {}
    before: dict[Card, str] = {}
    for claims in moments:
        cards = tuple(warboy(at, *claim) for at, claim in enumerate(claims))
        ids = identify(cards, known)
        devices = [device_ids(id_) for id_ in ids]
        assert sum(map(len, devices)) == len(set().union(*devices))
        slots = [card.pci_bus_id for card in cards if card.pci_bus_id]
        for card, id_ in zip(cards, ids, strict=True):
            # Of two in one slot, which no bus has, the one that says more may be taken for it.
            if before.get(card) in known and len(set(slots)) == len(slots):
                assert id_ == before[card]
        known = remember(known, cards, ids)
        before = dict(zip(cards, ids, strict=True))


@pytest.mark.parametrize(
    ("known", "claims", "ids"),
    [
        ({}, [("U0", "S0", "P0"), ("U1", "S1", "P1")], ("U0", "U1")),
        ({}, [(None, "S0", "P0"), ("U1", "S1", "P1")], ("S0", "U1")),
        ({}, [(None, None, "P0")], ("P0",)),
        ({}, [(None, None, None)], ("warboy-0",)),
        # Claimed twice: nobody's.
        ({}, [("U", "S0", "P0"), ("U", "S1", "P1"), ("V", "S2", "P2")], ("S0", "S1", "V")),
        ({}, [("U", "S", "P0"), ("U", "S", "P1")], ("P0", "P1")),
        ({}, [("U", None, "P0"), ("U", "S", "P1")], ("P0", "S")),
        ({}, [("U", "S", None), ("U", "S", None)], ("warboy-0", "warboy-1")),
        ({}, [("X", None, None), ("U", "X", None)], ("warboy-0", "U")),
        ({}, [(None, None, None), ("warboy-0", None, None)], ("warboy-0", "warboy-1")),
        # A second card says the UUID of a known one.
        ({"U": "uuid:U serial:S0 pci:P0"}, [("U", "S0", "P0"), ("U", "S1", "P1")], ("U", "S1")),
        ({"U": "uuid:U serial:S0 pci:P0"}, [("U", "S1", "P1"), ("U", "S0", "P0")], ("S1", "U")),
        # Also while the known one is away.
        ({"U": "uuid:U serial:S0 pci:P0"}, [("U", "S1", "P1")], ("S1",)),
        # Half an answer is no other card; another slot neither.
        ({"U": "uuid:U serial:S0 pci:P0"}, [(None, "S0", "P0")], ("U",)),
        ({"U": "uuid:U serial:S0 pci:P0"}, [(None, None, "P0")], ("U",)),
        ({"U": "uuid:U serial:S0 pci:P0"}, [("U", "S0", "P9")], ("U",)),
        ({"U": "uuid:U"}, [("U", None, "P9")], ("U",)),
        # Another card in the slot.
        ({"U": "uuid:U serial:S0 pci:P0"}, [("V", "S1", "P0")], ("V",)),
        ({"U": "uuid:U serial:S0 pci:P0"}, [(None, "S1", "P0")], ("S1",)),
        # An ID of before, though something better can be read by now.
        ({"S0": "serial:S0 pci:P0"}, [("U", "S0", "P0")], ("S0",)),
        # Two that fit equally well: nobody knows which it was.
        ({"U": "uuid:U"}, [("U", "S0", None), ("U", "S1", None)], ("S0", "S1")),
        ({"U": "uuid:U name:warboy-1"}, [("U", "S0", None), ("U", "S1", None)], ("S0", "U")),
        # An ID that would be taken for cores of another.
        ({}, [("WBY", None, None), ("WBY_cores_0", "S", None)], ("warboy-0", "S")),
        ({}, [("WBY_cores_0", None, None)], ("WBY_cores_0",)),
        ({"WBY": "serial:WBY"}, [(None, "WBY", "P0"), (None, "WBY_cores_0", "P1")], ("WBY", "P1")),
    ],
)
def test_ids(known: dict[str, str], claims: list[Claims], ids: tuple[str, ...]) -> None:
    before = {id_: frozenset(identities.split()) for id_, identities in known.items()}
    assert identify(tuple(warboy(at, *claim) for at, claim in enumerate(claims)), before) == ids


def test_identifiers_that_cannot_be_read_any_more_are_remembered() -> None:
    whole, half = warboy(0, "U", "S", "P"), warboy(0, None, "S", "P")
    known = remember(remember({}, (whole,), ("U",)), (half,), ("U",))
    assert known == {"U": frozenset({"uuid:U", "serial:S", "pci:P", "name:warboy-0"})}


RANGES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(
    lambda ends: CoreRange(min(ends), max(ends))
)


@given(RANGES, RANGES)
def test_core_ranges_are_sets_of_cores(one: CoreRange, other: CoreRange) -> None:
    mine, its = set(one), set(other)
    assert len(one) == len(mine)
    assert one.includes(other) == (its <= mine)
    assert one.overlaps(other) == bool(mine & its)


def test_a_card_with_another_identity_after_each_reset_fills_no_memory() -> None:
    """And the cards that stay are known for ever."""
    known: dict[str, frozenset[str]] = {}
    stays = warboy(0, "stays", None, "P0")
    for number in range(300):
        cards = (stays, warboy(1, f"U{number}", None, "P1"))
        known = remember(known, cards, identify(cards, known))
    assert known.keys() == {"stays", *(f"U{number}" for number in range(173, 300))}
    assert identify((warboy(0, None, None, "P0"),), known) == ("stays",)
