"""The table that compares two commits."""

from bench.against import table


def test_a_row_has_both_medians_and_the_ratio_with_its_spread() -> None:
    rows = table({"CPU, %": [0.2, 0.3, 0.1]}, {"CPU, %": [1.0, 0.5, 1.0]}, "66a95401")
    assert rows.splitlines() == [
        "| figure | this | 66a95401 | this / 66a95401, least to most |",
        "|---|---|---|---|",
        "| CPU, % | 0.20 | 1.00 | 0.20 (0.10 to 0.60) |",
    ]
