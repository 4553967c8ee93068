"""What DRA publishes of a card, whatever its driver wrote; whole slices: tests/outputs/dra."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npu_agent.core.hardware import Card
from npu_agent.core.pool import Value, Version
from npu_agent.outputs.dra.slices import slices
from npu_agent.vendors.furiosa import parse
from npu_agent.vendors.furiosa.attributes import DRA, describe, version
from npu_agent.vendors.furiosa.families import FAMILIES
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.dra.cards import pool_of
from tests.outputs.dra.rules import faults

RAW = st.one_of(
    st.none(),
    st.binary(max_size=80),
    st.text(min_size=50, max_size=120).map(str.encode),
    st.sampled_from([b"E23A7C54-0000-4E50-8000-6E70752D6167\n", b"0000:6d:00.0", b"-1\n", b"7\n"]),
)
PIECES = ("1", "01", ".", "~", ",", " ", "+", "-", "dev0", "7e25130", "é", "\u0661", "x" * 62)
VERSION = st.one_of(
    RAW,
    st.lists(st.sampled_from(PIECES), max_size=9).map(lambda parts: "".join(parts).encode()),
    st.from_regex(r"\A[0-9]{1,4}(\.[0-9]{1,2}){2}(~[a-z0-9.-]{1,50})?(, [0-9a-f]{1,60})?\Z").map(
        str.encode
    ),
)
SWITCHES = st.lists(
    st.sampled_from(["pci0000:16", "pci10000:e1", "0000:16:01.0", "pci", "pci0000:16\n", "é" * 40]),
    max_size=4,
).map(tuple)


@given(
    st.sampled_from(list(FAMILIES)),
    st.integers(0, 9999),
    st.tuples(RAW, RAW, RAW, RAW),
    st.tuples(VERSION, VERSION),
    SWITCHES,
)
@example("rngd", 0, (None,) * 4, (b"1.2.3, " + b"a" * 58, b"1.2.3, " + b"a" * 59), ())
def test_whatever_the_driver_writes_the_slice_is_valid(
    family: str,
    index: int,
    files: tuple[bytes | None, ...],
    versions: tuple[bytes | None, ...],
    switches: tuple[str, ...],
) -> None:
    uuid, serial, address, numa = files
    card = state(
        family,
        index,
        uuid=parse.identifier(uuid),
        serial=parse.identifier(serial),
        pci_bus_id=parse.pci_address(address),
        numa_node=parse.numa_node(numa),
        driver_version=parse.text(versions[0]),
        firmware_version=parse.text(versions[1]),
        switches=switches,
    )
    (found,) = slices(pool_of(card), driver=DRA.driver, node="n1", uid="u", generation=1)
    assert faults(found) == []
    # Never a part of what identifies a card.
    described = attributes(card.card)
    assert described.get("uuid") in (None, card.card.uuid)
    assert described.get("serial") in (None, card.card.serial)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.9.2, 3def9c2", "1.9.2+3def9c2"),
        ("2025.4.0~dev2, 0e9e56a", "2025.4.0-dev2+0e9e56a"),
        ("2025.4.0~dev2", "2025.4.0-dev2"),
        ("1.9.2", "1.9.2"),
        ("1.9.2,", "1.9.2"),
        (" 1.9.2 ~ rc.1 , 3def9c2 ", "1.9.2-rc.1+3def9c2"),
        ("2026.3.1, e28c5c0", "2026.3.1+e28c5c0"),
        ("2026.1.0(rc0), 5b172ac", "2026.1.0-rc0+5b172ac"),
        ("2026.1.0 (rc0)", "2026.1.0-rc0"),
        ("0.0.16+b4a67ca", "0.0.16+b4a67ca"),
        ("1.7.0, 4dfed1852e7b", "1.7.0+4dfed1852e7b"),
        ("2026.1.0-rc0, 5b172ac", "2026.1.0-rc0+5b172ac"),
        # What says nothing of the order does not hide what does.
        ("2026.3.1, e28c5c0 (dirty)", "2026.3.1"),
        ("2026.3.1+a_b", "2026.3.1"),
        ("2026.1.0(rc0)(rc1)", None),
        ("2026.1.0()", "2026.1.0"),
        ("1.9", None),
        ("1.09.2", None),
        ("1.9.2~rc_1", None),
        ("v1.9.2", None),
        ("", None),
        (None, None),
    ],
)
def test_a_version_is_semver_or_left_out(text: str | None, expected: str | None) -> None:
    found = version(text)
    assert found == expected
    assert found is None or isinstance(found, Version)


def attributes(card: Card) -> dict[str, Value]:
    return dict(describe(card, card.all_cores).attributes)


def test_unknown_attributes_are_left_out() -> None:
    card = FAMILIES["warboy"].card(0, product="warboyB0")
    assert attributes(card) == {
        "index": 0,
        "arch": "warboy",
        "type": "card",
        "cores": 2,
        "product": "warboyB0",
    }


@pytest.mark.parametrize("switches", [(), ("0000:16:01.0",), ("pci16", "pci0000:16")])
def test_an_odd_pci_path_gives_no_root_complex(switches: tuple[str, ...]) -> None:
    card = FAMILIES["rngd"].card(0, product="rngd", switches=switches)
    assert "resource.kubernetes.io/pcieRoot" not in attributes(card)
