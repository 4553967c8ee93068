"""Which labels which hardware gives: a golden file of hosts, and rules for any text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npu_agent.core.hardware import CardState, Health, HealthState, SkippedDevice, Snapshot
from npu_agent.outputs.labels.compute import (
    LONGEST,
    Machine,
    explained,
    labels,
    read_machine,
    value,
    why_incomplete,
)
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.labels import SETS as BY_NAME
from tests.golden import golden
from tests.inventory.helpers import tree

GOLDEN = Path(__file__).parent / "golden.txt"
SETS = tuple(BY_NAME.values())
BETA = BY_NAME["beta"]

# Kubernetes, "Labels and Selectors", and apimachinery's IsValidLabelValue.
VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
KEY = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[a-z][a-z.]*[a-z]"
)

SERVER = Machine(vendor="Dell Inc.\n", name="PowerEdge R750\n")


def card(family: str = "warboy", index: int = 0, **values: Any) -> CardState:
    known = {
        "warboy": ("warboyB0", "1.9.2, 3def9c2", "1.6.0, c1bebfd"),
        "rngd": ("rngd", "2025.4.0~dev0, 7e25130", "2025.4.0, 9a1f0c3"),
    }[family]
    values = (
        dict(zip(("product", "driver_version", "firmware_version"), known, strict=True)) | values
    )
    return CardState(
        id=f"{family}-{index}",
        card=FAMILIES[family].card(index, **values),
        health=Health(state=HealthState.HEALTHY, reason="works", since=0.0),
    )


def host(*cards: CardState, skipped: tuple[SkippedDevice, ...] = ()) -> Snapshot:
    return Snapshot(cards=cards, skipped=skipped, complete=True)


def versions(*texts: str | None, machine: Machine = SERVER) -> tuple[Snapshot, Machine]:
    """Warboys whose drivers, and whose firmware, say these."""
    cards = (card(index=at, driver_version=t, firmware_version=t) for at, t in enumerate(texts))
    return host(*cards), machine


def dmi(vendor: str | None, name: str | None) -> tuple[Snapshot, Machine]:
    return host(card()), Machine(vendor=vendor, name=name)


UNHEALTHY = Health(state=HealthState.UNHEALTHY, reason="alive says 0", since=0.0)
SAMPLE = SkippedDevice("/sys/class/npu_mgmt/npu1_mgmt", "an FPGA sample", sample_of="warboy")
UNREAD = SkippedDevice("/sys/class/npu_mgmt/npu1_mgmt", "no answer within 0.5 s", unread=True)
FOREIGN = SkippedDevice(
    "/sys/class/npu_mgmt/npu2_mgmt", "platform_type is 'Acme' and not FuriosaAI"
)

HOSTS: dict[str, tuple[Snapshot, Machine]] = {
    "one-warboy": (host(card()), SERVER),
    "one-rngd": (host(card("rngd")), SERVER),
    "one-unhealthy-of-two": (host(card(), replace(card(index=1), health=UNHEALTHY)), SERVER),
    "mixed-products": (
        host(card(index=0), card(index=1, product="warboy"), card("rngd", 2)),
        SERVER,
    ),
    "mixed-drivers": versions("1.10.0, 3def9c2", "1.9.2, c1bebfd", "1.9.2, c1bebfd"),
    "driver-of-one-unknown": versions("1.9.2, 3def9c2", None),
    "no-versions": versions(None),
    "version-prerelease": versions("2025.4.0~dev0, 7e25130"),
    "version-prerelease-in-brackets": versions("2026.1.0(rc0), 5b172ac"),
    "version-with-a-build": versions("0.0.16+b4a67ca"),
    "version-no-commit": versions("1.9.2"),
    "version-commit-alone": versions("3def9c2"),
    "version-of-two-numbers": versions("1.9, 3def9c2"),
    "version-of-four-numbers": versions("1.9.2.14, 3def9c2"),
    "version-with-more": versions("1.9.2rc1, 3def9c2, dirty (root@build)"),
    "version-punctuation": versions(", ~,"),
    "version-garbage": versions("driver of the day: 版本/½ \x1b[31m"),
    "version-very-long": versions("1." + "9" * 80 + ", " + "ab/" * 60),
    "more-versions-than-fit": versions(*(f"2025.{minor}.0, {minor:07x}" for minor in range(12))),
    "dmi-absent": dmi(None, None),
    "dmi-empty": dmi("", " \n"),
    "dmi-unicode": dmi("Müller & Söhne GmbH — 株式会社\n", "株式会社\n"),
    "dmi-slashes": dmi("//Acme/Corp.//\n", "kubernetes.io/evil=1\n"),
    "dmi-long": dmi("x" * 300, "Super Server " * 23),
    "dmi-symbols": dmi("***", "._-._-"),
    "dmi-lines": dmi("Acme\nnpu.count=99\nCorp\n", "\0\r\n\tR\0750\x1b[31m\ufffd"),
    "fpga-sample": (host(skipped=(SAMPLE,)), SERVER),
    "fpga-sample-and-cards": (host(card(), card("rngd", 2), skipped=(SAMPLE,)), SERVER),
    "no-cards": (host(), SERVER),
    "no-cards-but-odd-ones": (host(skipped=(FOREIGN, UNREAD)), SERVER),
    "unread-beside-a-card": (host(card(), skipped=(UNREAD,)), SERVER),
}


def _lines(snapshot: Snapshot, machine: Machine) -> dict[str, str]:
    """What is said of each label, and of the whole."""
    lines = {"unsure": f"unsure: {why_incomplete(snapshot)}"}
    for label in explained(snapshot, machine, SETS):
        said = "has no label" if label.value is None else f"= {label.value}"
        lines[label.key] = f"{label.key} {said}  ({label.why})"
    return lines


def test_labels_are_as_in_the_golden_file() -> None:
    """Of the first host it has all, and of each other one what differs from that."""
    first: dict[str, str] = {}
    lines: list[str] = []
    for name, host in HOSTS.items():
        said = _lines(*host)
        assert said.keys() == first.keys() or not first
        lines += [f"# {name}", *(line for key, line in said.items() if line != first.get(key)), ""]
        first = first or said
    found = "\n".join(lines)
    assert found == golden(GOLDEN, found)


def test_sets_come_together_or_alone_and_twice_is_once() -> None:
    snapshot, machine = HOSTS["one-warboy"]
    whole = labels(snapshot, machine, SETS)
    assert list(whole) == sorted(whole)
    parts = [labels(snapshot, machine, {set_}) for set_ in SETS]
    assert {key: text for part in parts for key, text in part.items()} == whole
    assert all(parts)
    assert sum(map(len, parts)) == len(whole)
    assert labels(snapshot, machine, [BETA, BETA]) == labels(snapshot, machine, [BETA])
    assert labels(snapshot, machine, ()) == {}


@pytest.mark.parametrize(("length", "kept"), [(31, 2), (32, 1)])
def test_values_are_joined_as_long_as_they_fit_whole(length: int, kept: int) -> None:
    commits = ("a" * 31, "b" * length)
    found = labels(*versions(*(f"1.9.2, {commit}" for commit in commits)), [BETA])
    assert found["beta.furiosa.ai/driver.reference"] == "_".join(commits[:kept])


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1.9.2-rc1", ["1", "9", "2"]),
        ("1.9.2rc1", ["1", "9"]),
        ("1.9.2\u0663", ["1", "9"]),
        ("1..2", ["1"]),
        ("v1.9.2", []),
        ("1234567890", []),
    ],
)
def test_only_whole_numbers_become_parts_of_a_version(text: str, numbers: list[str]) -> None:
    found = labels(*versions(text), [BETA])
    parts = [found.get(f"beta.furiosa.ai/driver.version.{x}") for x in ("major", "minor", "patch")]
    assert [part for part in parts if part] == numbers


def test_only_an_unread_entry_makes_unsure() -> None:
    assert why_incomplete(host(card(), skipped=(SAMPLE, FOREIGN))) is None
    assert why_incomplete(host(skipped=(FOREIGN, UNREAD))) == (
        "an entry that may be a card cannot be read: /sys/class/npu_mgmt/npu1_mgmt: no answer "
        "within 0.5 s"
    )


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("a--b", "a--b"),
        ("A - B", "A-B"),
        ("-.x._", "x"),
        ("٣", None),  # a digit, and not ASCII
        ("x" * 64, "x" * 63),
        ("x" * 62 + ".y", "x" * 62),
    ],
)
def test_a_value_is_made_of_a_text(text: str, made: str | None) -> None:
    assert value(text) == made


@given(st.text() | st.text("aZ0-_. ~/é", max_size=80))
@example("-" * 70 + "x")
def test_a_value_is_valid_for_every_text(text: str) -> None:
    made = value(text)
    if made is None:
        assert not re.search(r"[A-Za-z0-9]", text)
    else:
        assert len(made) <= LONGEST
        assert VALUE.fullmatch(made)
        assert value(made) == made


@given(st.from_regex(VALUE, fullmatch=True).filter(lambda text: len(text) <= LONGEST))
def test_a_valid_value_stays_as_it_is(text: str) -> None:
    assert value(text) == text


def test_keys_are_valid_and_ours() -> None:
    for set_ in SETS:
        assert len(set(set_.keys)) == len(set_.keys)
        for key in set_.keys:
            assert KEY.fullmatch(key)
            assert len(key.removeprefix(set_.prefix)) <= LONGEST
            assert "kubernetes.io" not in key


def test_simulated_cards_have_a_label_of_their_own_whatever_sets_are_wanted() -> None:
    simulated = host(card(simulated=True), card(index=1, simulated=True))
    assert labels(simulated, SERVER, ()) == {"npu-agent/simulated": "true"}
    (why,) = explained(simulated, SERVER, ())
    assert why.why == "npu0, npu1: simulated"
    assert explained(host(card()), SERVER, ()) == ()


async def test_the_machine_is_what_its_firmware_says(tmp_path: Path) -> None:
    root = tree(tmp_path / "host", "warboy=1")
    assert await read_machine(root) == Machine(vendor="npu-agent\n", name="Simulated Host\n")


async def test_a_machine_without_names_has_none(tmp_path: Path) -> None:
    assert await read_machine(tmp_path) == Machine(vendor=None, name=None)
    directory = tmp_path / "sys/class/dmi/id"
    (directory / "sys_vendor").mkdir(parents=True)
    (directory / "product_name").symlink_to("product_name")
    assert await read_machine(tmp_path) == Machine(vendor=None, name=None)


async def test_hostile_names_are_read_up_to_256_bytes(tmp_path: Path) -> None:
    directory = tmp_path / "sys/class/dmi/id"
    directory.mkdir(parents=True)
    (directory / "sys_vendor").write_bytes(b"\xff\xfe\0" * 5000)
    (directory / "product_name").write_bytes("é".encode() * 127 + b"\n" + "é".encode() * 99)
    machine = await read_machine(tmp_path)
    assert machine.vendor == ("\ufffd\ufffd\0" * 86)[:256]
    assert machine.name == "é" * 127 + "\n" + "\ufffd"
    assert labels(Snapshot(), machine, SETS) == {}
