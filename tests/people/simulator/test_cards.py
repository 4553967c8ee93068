from dataclasses import replace

import pytest

from npu_agent.people.simulator import parse_cards
from npu_agent.people.simulator.cards import MAX_CARDS, card, swapped
from npu_agent.people.simulator.families import FAMILIES


def test_cards_are_numbered_over_all_families_in_the_order_given() -> None:
    specs = parse_cards(" warboy=2, rngd , warboy=1")

    assert [(spec.name, spec.family) for spec in specs] == [
        ("npu0", "warboy"),
        ("npu1", "warboy"),
        ("npu2", "rngd"),
        ("npu3", "warboy"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("warboy=1,", ["unknown family ''", "there are: warboy, rngd"]),
        ("wraboy=2", ["'wraboy'", "did you mean 'warboy'?"]),
        ("warboy=", ["''", "warboy=2"]),
        ("warboy=-1", ["'-1'", "not a number of cards"]),
        ("warboy=²", ["'²'", "not a number of cards"]),
        ("rngd=1000,warboy=25", ["more than 1024"]),
        ("rngd=99999", ["'99999'", "not a number of cards"]),
    ],
)
def test_a_bad_list_is_refused_with_what_would_be_right(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match="--cards") as caught:
        parse_cards(text)
    for word in words:
        assert word in str(caught.value)


def test_no_two_cards_share_an_identity_or_a_place() -> None:
    specs = [card(family, index) for family in FAMILIES for index in range(MAX_CARDS)]

    assert len({spec.uuid for spec in specs}) == len(specs)
    assert len({spec.serial for spec in specs}) == len(specs)
    assert len({spec.dev for spec in specs}) == len(specs)
    ports = {part for spec in specs for part in f"{spec.pci_path}/{spec.pci_bus_id}".split("/")[1:]}
    warboys = specs[:MAX_CARDS]
    assert len({spec.pci_bus_id for spec in warboys}) == MAX_CARDS
    # Card, downstream port; and per pair one upstream port and one root port.
    assert len(ports) == MAX_CARDS * 3


def test_an_exchanged_card_is_in_the_same_place() -> None:
    old = card("warboy", 1)
    new = swapped(old)

    assert new.uuid != old.uuid
    assert new.serial != old.serial
    assert replace(new, uuid=old.uuid, serial=old.serial) == old
    assert len({old.uuid, new.uuid, swapped(new).uuid}) == 3
    twin = replace(old, serial="another")
    assert swapped(twin).uuid != new.uuid, "cards that had one UUID are two"


def test_hosts_that_are_named_have_other_cards_each() -> None:
    one, other = (parse_cards("warboy=1,rngd=1", host=host) for host in ("a/", "b/"))
    assert len({spec.uuid for spec in (*one, *other, *parse_cards("warboy=1,rngd=1"))}) == 6
    assert [spec.pci_bus_id for spec in one] == [spec.pci_bus_id for spec in other]
