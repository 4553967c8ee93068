"""Histograms."""

from npu_agent.core.counts import Histogram


def test_a_number_counts_at_the_first_bound_that_it_does_not_pass() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.add(number)
    assert histogram.counts == [2, 2, 2]
    assert histogram.total == 107.0
