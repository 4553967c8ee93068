"""One run goes into all pages that show figures, and changes nothing else in them."""

from __future__ import annotations

import pytest

from bench import report
from bench.figure import HEADER, Figure

RUN = "2026-11-25: npu-agent 0.1.0"
FIGURES = (Figure("start", "0.5 s", "<= 1 s"), Figure("memory", "50 MiB"))


def test_the_table_stands_between_the_marks() -> None:
    text = f"Before.\n\n{report.BEGIN}\nan older run\n\n{report.END}\nAfter.\n"
    table = f"{HEADER}\n{FIGURES[0]}\n{FIGURES[1]}"
    once = f"Before.\n\n{report.BEGIN}\n{RUN}\n\n{table}\n\n{report.END}\nAfter.\n"
    assert report.page(text, RUN, FIGURES) == once
    assert report.page(once, RUN, FIGURES) == once


def test_a_page_without_marks_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="lost its marks"):
        report.page(f"Only {report.BEGIN}", RUN, FIGURES)


def test_a_readme_names_the_figures_that_it_shows() -> None:
    text = "| figure | on <!-- date --> |\n|---|---|\n| RAM | <!-- memory -->49 MiB |\n"
    expected = (
        "| figure | on <!-- date -->2026-11-25 |\n|---|---|\n| RAM | <!-- memory -->50 MiB |\n"
    )
    assert report.readme(text, RUN, FIGURES) == expected
    with pytest.raises(KeyError, match="speed"):
        report.readme("| <!-- speed -->1 |", RUN, FIGURES)
