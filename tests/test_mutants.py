"""The faults of `make mutants` fit the source as it is: else nobody tries them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.mutants import FAULTS, ROOT


def test_each_fault_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(one.name for one in FAULTS).items() if count > 1] == []


def test_each_fault_is_in_its_file_once() -> None:
    sources = {file: Path(ROOT, file).read_text() for file in {one.file for one in FAULTS}}
    assert [one.name for one in FAULTS if sources[one.file].count(one.old) != 1] == []


def test_each_fault_has_tests_that_there_are() -> None:
    named = {word for one in FAULTS for word in one.tests.split() if word.startswith("tests/")}
    assert [name for name in sorted(named) if not Path(ROOT, name).exists()] == []
