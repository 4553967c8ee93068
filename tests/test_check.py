"""`make check` runs what would fail in `make test` for the file that was changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check import ELSEWHERE, ROOT, main, modules_for


@pytest.mark.parametrize(
    ("file", "modules"),
    [
        ("npu_agent/core/pool.py", {"tests/core/test_pool.py"}),
        ("tests/core/test_pool.py", {"tests/core/test_pool.py"}),
        (
            "npu_agent/vendors/furiosa/metrics.py",  # a row of the page, and golden files
            {"tests/outputs/prometheus/test_docs.py", "tests/outputs/prometheus/test_golden.py"},
        ),
        (
            "npu_agent/vendors/furiosa/labels.py",
            {"tests/outputs/labels/test_compute.py", "tests/docs/test_labels.py"},
        ),
        ("npu_agent/config/schema.py", {"tests/docs/test_configuration.py"}),
        ("docs/labels.md", {"tests/docs/test_translations.py", "tests/docs/test_links.py"}),
    ],
)
def test_the_tests_of_a_file(file: str, modules: set[str]) -> None:
    assert modules <= set(map(str, modules_for([Path(file)])))


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_each_row_is_of_files_and_tests_that_there_are(pattern: str) -> None:
    assert any(ROOT.glob(pattern))
    assert all((ROOT / module).is_file() for module in ELSEWHERE[pattern])


def test_a_file_that_cannot_be_checked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s/daemonset.yaml"]) == 2
    assert "k8s/daemonset.yaml: no Python file or page" in capsys.readouterr().err
