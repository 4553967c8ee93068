import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.hardware import Card, CoreRange, Reading, Sensor, SensorKind, identify
from npu_agent.vendors.furiosa.families import FAMILIES


def warboy(index: int, uuid: str | None, serial: str | None, pci: str | None) -> Card:
    return FAMILIES["warboy"].card(
        index, product="warboy", uuid=uuid, serial=serial, pci_bus_id=pci
    )


@pytest.mark.parametrize(
    ("claims", "ids"),
    [
        ([("U0", "S0", "P0"), ("U1", "S1", "P1")], ("U0", "U1")),
        ([(None, "S0", "P0"), ("U1", "S1", "P1")], ("S0", "U1")),
        ([(None, None, "P0")], ("P0",)),
        ([(None, None, None)], ("warboy-0",)),
        # Claimed twice: nobody's.
        ([("U", "S0", "P0"), ("U", "S1", "P1"), ("V", "S2", "P2")], ("S0", "S1", "V")),
        ([("U", "S", "P0"), ("U", "S", "P1")], ("P0", "P1")),
        ([("U", None, "P0"), ("U", "S", "P1")], ("P0", "S")),
        ([("U", "S", None), ("U", "S", None)], ("warboy-0", "warboy-1")),
        ([("X", None, None), ("U", "X", None)], ("warboy-0", "U")),
        ([(None, None, None), ("warboy-0", None, None)], ("warboy-0", "warboy-1")),
    ],
)
def test_ids(claims: list[tuple[str | None, str | None, str | None]], ids: tuple[str, ...]) -> None:
    assert identify(tuple(warboy(at, *claim) for at, claim in enumerate(claims))) == ids


IDENTITY = st.one_of(st.none(), st.sampled_from([*string.ascii_uppercase[:4], "warboy-0"]))
CLAIMS = st.lists(st.tuples(IDENTITY, IDENTITY, IDENTITY), max_size=6)


@given(CLAIMS)
def test_ids_are_never_shared(claims: list[tuple[str | None, str | None, str | None]]) -> None:
    ids = identify(tuple(warboy(at, *claim) for at, claim in enumerate(claims)))
    assert len(set(ids)) == len(claims)


@given(CLAIMS)
def test_ids_do_not_depend_on_the_order_or_on_what_else_is_there(
    claims: list[tuple[str | None, str | None, str | None]],
) -> None:
    cards = [warboy(at, *claim) for at, claim in enumerate(claims)]
    expected = dict(zip(cards, identify(tuple(cards)), strict=True))
    cards.reverse()
    stranger = warboy(99, "stranger", None, None)
    assert dict(zip(cards, identify((stranger, *cards))[1:], strict=True)) == expected


def test_an_id_does_not_change_when_the_card_gets_another_number() -> None:
    assert identify((warboy(0, "U", "S", "P"),)) == identify((warboy(5, "U", "S", "P"),))


@pytest.mark.parametrize(("text", "cores"), [("0", CoreRange(0, 0)), ("0-3", CoreRange(0, 3))])
def test_core_ranges_are_written_as_in_node_names(text: str, cores: CoreRange) -> None:
    assert str(cores) == text


RANGES = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(
    lambda ends: CoreRange(min(ends), max(ends))
)


@given(RANGES, RANGES)
def test_core_ranges_are_sets_of_cores(one: CoreRange, other: CoreRange) -> None:
    mine, its = set(one), set(other)
    assert len(one) == len(mine)
    assert one.includes(other) == (its <= mine)
    assert one.overlaps(other) == bool(mine & its)


def test_the_hottest_sensor_and_the_largest_power_are_shown() -> None:
    kinds = SensorKind
    reading = Reading(
        at=0.0,
        sensors=(
            Sensor(kinds.TEMPERATURE, "ambient", 31_000),
            Sensor(kinds.TEMPERATURE, "peak", 62_500),
            Sensor(kinds.POWER, "core", 900_000),
            Sensor(kinds.POWER, "total", 1_370_000),
            Sensor(kinds.VOLTAGE, "0", 99_000_000),
        ),
    )
    assert (reading.temperature(), reading.power()) == (62.5, 1.37)
    assert Reading(at=0.0).temperature() is None


@pytest.mark.parametrize(
    ("family", "nodes", "widths", "shared", "whole"),
    [
        ("warboy", 9, (1, 2), 5, ("npu3",)),
        ("rngd", 35, (1, 2, 4, 8), 21, ()),
    ],
)
def test_families_have_the_nodes_of_their_driver(
    family: str, nodes: int, widths: tuple[int, ...], shared: int, whole: tuple[str, ...]
) -> None:
    found = FAMILIES[family]
    assert len(set(found.nodes(3))) == len(found.nodes(3)) == nodes
    assert found.widths == widths
    assert len(found.shared(3)) == shared
    assert found.whole(3) == whole


@pytest.mark.parametrize(
    ("family", "device_type", "soc_rev", "product"),
    [
        ("warboy", "Warboy", "B0", "warboyB0"),
        ("warboy", "warboy", "b0", "warboyB0"),
        ("warboy", "Warboy", "A0", "warboy"),
        ("warboy", "Warboy", None, "warboy"),
        ("warboy", "RNGD", "B0", None),
        ("rngd", "RNGD", "B0", "rngd"),
        ("rngd", "rngd", None, "rngd"),
        ("rngd", "Warboy", "B0", None),
        ("rngd", "", None, None),
    ],
)
def test_products(family: str, device_type: str, soc_rev: str | None, product: str | None) -> None:
    assert FAMILIES[family].product(device_type, soc_rev) == product
