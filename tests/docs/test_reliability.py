"""docs/reliability.md has a row for each attack of tests/chaos, and all of them were withstood."""

from __future__ import annotations

import re

from tests.chaos.attacks import ATTACKS
from tests.chaos.table import row
from tests.e2e import test_attacks, test_it_keeps_working

from .pages import page

PAGE = page("docs/reliability.md")


def rows(title: str) -> list[list[str]]:
    """The cells of each row of a table that `make chaos` writes."""
    found = re.search(rf"<!-- {title} -->(.*)<!-- end of {title} -->", PAGE.text, re.DOTALL)
    assert found
    lines = [line for line in found[1].splitlines() if line.startswith("| ")]
    return [
        re.split(r" (?<!\\)\| ", line.removeprefix("| ").removesuffix(" |")) for line in lines[1:]
    ]


def test_every_attack_has_its_row() -> None:
    """Written by `make chaos`, or `make chaos ARGS=` and the name of the attack."""
    there = [
        [attack.what.replace("|", "\\|"), attack.holds.replace("|", "\\|")] for attack in ATTACKS
    ]
    assert [row[:2] for row in rows("stand-ins")] == there


def test_every_scenario_on_a_real_kubelet_has_its_row() -> None:
    """Written by `make chaos`."""
    there = [
        list(row(play))
        for module in (test_it_keeps_working, test_attacks)
        for name, play in vars(module).items()
        if name.startswith("test_")
    ]
    assert [found[:2] for found in rows("real kubelet")] == there


def test_every_attack_was_withstood() -> None:
    results = rows("stand-ins") + rows("real kubelet")
    assert results
    assert {result for *_, result in results} == {"withstood"}


def test_names_of_attacks_are_their_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert len({attack.what for attack in ATTACKS}) == len(ATTACKS)
