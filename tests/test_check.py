"""`make check` finds the tests that belong to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check import main, modules_for


def found(*files: str) -> list[str]:
    return [str(each) for each in modules_for(map(Path, files))]


def test_a_module_has_the_modules_for_its_place() -> None:
    assert found("npu_agent/core/ledger.py") == ["tests/core/test_ledger.py"]
    assert found("npu_agent/files.py") == ["tests/test_files.py", "tests/test_files_content.py"]


def test_a_test_has_itself_and_each_is_run_once() -> None:
    files = ("tests/core/test_ledger.py", "npu_agent/core/ledger.py")
    assert found(*files) == ["tests/core/test_ledger.py"]


def test_tests_that_start_clusters_are_left_to_their_own_targets() -> None:
    assert found("tests/e2e/test_labels.py", "tests/conftest.py", "bench/idle.py") == []


@pytest.mark.parametrize("file", ["README.md", "npu_agent/nothing.py"])
def test_what_cannot_be_checked_is_named(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([file]) == 2
    assert file in capsys.readouterr().err
