"""One run goes into all pages that show figures, and changes nothing else in them."""

from __future__ import annotations

import pytest

from bench import report
from bench.figure import HEADER, Figure

RUN = "2026-11-25: npu-agent 0.1.0"
FIGURES = (Figure("start", "0.5 s", "<= 1 s"), Figure("memory", "50 MiB"))


def test_the_table_stands_between_the_marks() -> None:
    text = f"Before.\n\n{report.BEGIN}\nan older run\n\n{report.END}\nAfter.\n"
    table = report.table(FIGURES)
    assert table == f"{HEADER}\n{FIGURES[0]}\n{FIGURES[1]}"
    once = f"Before.\n\n{report.BEGIN}\n{RUN}\n\n{table}\n\n{report.END}\nAfter.\n"
    assert report.page(text, RUN, table) == once
    assert report.page(once, RUN, table) == once


def test_a_page_without_marks_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="lost its marks"):
        report.page(f"Only {report.BEGIN}", RUN, "")


def test_a_readme_names_the_figures_that_it_shows() -> None:
    text = "| figure | on <!-- date --> |\n|---|---|\n| RAM | <!-- memory -->49 MiB |\n"
    expected = (
        "| figure | on <!-- date -->2026-11-25 |\n|---|---|\n| RAM | <!-- memory -->50 MiB |\n"
    )
    assert report.readme(text, RUN, FIGURES) == expected
    with pytest.raises(KeyError, match="speed"):
        report.readme("| <!-- speed -->1 |", RUN, FIGURES)


def test_peers_stand_next_to_ours_in_a_row_of_their_figure() -> None:
    found = (
        Figure("ours: memory", "50 MiB"),
        Figure("ours: idle: CPU", "0.4 %"),
        Figure("theirs: memory", "20 MiB"),
    )
    assert report.compared(found, ("ours", "theirs")).splitlines() == [
        "| figure | ours | theirs |",
        "| --- | --- | --- |",
        "| memory | 50 MiB | 20 MiB |",
        "| idle: CPU | 0.4 % | |",
    ]


def test_a_run_of_peers_changes_their_figures_alone_and_one_of_ours_ours() -> None:
    text = "| 1 <!-- memory -->49 MiB | <!-- peers, date -->2025 | <!-- peers, ours: RAM -->9 |"
    of_ours = report.readme(text, RUN, FIGURES)
    assert of_ours == text.replace("49", "50")
    of_peers = report.readme(text, RUN, [Figure("ours: RAM", "8")], report.PEERS)
    assert of_peers == text.replace("2025", "2026-11-25").replace("-->9 |", "-->8 |")
