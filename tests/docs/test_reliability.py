"""docs/reliability.md has a row for each module of tests/chaos/attacks and leads to its tests."""

from __future__ import annotations

import re

from tests.chaos.attacks import ATTACKS
from tests.e2e import test_attacks, test_it_keeps_working

from .pages import ROOT, page

PAGE = page("docs/reliability.md")


def test_every_class_of_faults_has_a_row() -> None:
    rows = set(re.findall(r"^\| .* \| \[`(\w+)\.py`\]", PAGE.text, re.MULTILINE))
    assert rows == {path.stem for path in (ROOT / "tests/chaos/attacks").glob("[!_]*.py")}


def test_each_attack_says_what_is_done_and_what_has_to_hold() -> None:
    tests = [attack.play for attack in ATTACKS] + [
        test
        for module in (test_it_keeps_working, test_attacks)
        for name, test in vars(module).items()
        if name.startswith("test_")
    ]
    short = [test.__name__ for test in tests if len((test.__doc__ or "").split("\n\n")) != 2]
    assert not short


def test_names_of_attacks_are_their_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert len({attack.what for attack in ATTACKS}) == len(ATTACKS)
