"""Labels, families and rendering, compared with prometheus_client's own encoder and parsers."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest as library_text
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as library_openmetrics
from prometheus_client.registry import Collector

from npu_agent.core.counts import Histogram
from npu_agent.outputs.prometheus.text import LONGEST, MetricFamily, clean, finite, label_text
from tests.outputs.prometheus.helpers import parsed

TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
"""Lone surrogates among them."""
NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.just(10**400), st.none())

LABELS = st.fixed_dictionaries({"a": TEXTS, "b": st.one_of(TEXTS, st.none())})


class _Only(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self.metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self.metrics


def _render(
    samples: Any, name: str = "x", kind: Any = "gauge", help_: str = "X.", *, openmetrics: bool
) -> bytes:
    return MetricFamily(name=name, kind=kind, help=help_, samples=samples).render(
        openmetrics=openmetrics
    )


Given = list[tuple[dict[str, str | None], float | None]]
HELP = 'A "help" with \\ and\nmore.'


def _histogram(given: Given) -> Histogram:
    histogram = Histogram((0.001, 0.5, 2))
    for _, value in given:
        if (number := finite(value)) is not None:
            histogram.add(abs(number))
    return histogram


def _ours(given: Given, *, openmetrics: bool) -> bytes:
    gauges = [(label_text(**labels), value) for labels, value in given]
    counts = [(labels, abs(value or 0)) for labels, value in gauges]
    return b"".join(
        (
            _render(gauges, "a_gauge", "gauge", HELP, openmetrics=openmetrics),
            _render(counts, "b_things_total", "counter", HELP, openmetrics=openmetrics),
            _render(
                [("", _histogram(given))], "c_seconds", "histogram", HELP, openmetrics=openmetrics
            ),
            b"# EOF\n" if openmetrics else b"",
        )
    )


def _in_the_library(given: Given) -> list[Metric]:
    gauge = Metric("a_gauge", HELP, "gauge")
    counter = Metric("b_things", HELP, "counter")
    for metric, values in (
        (gauge, [value for _, value in given]),
        (counter, [abs(value or 0) for _, value in given]),
    ):
        seen = []
        for (labels, _), value in zip(given, values, strict=True):
            cleaned = {name: clean(text) for name, text in labels.items() if text is not None}
            if value is None or cleaned in seen:
                continue
            seen.append(cleaned)
            if (number := finite(value)) is not None:
                name = "b_things_total" if metric is counter else "a_gauge"
                metric.add_sample(name, cleaned, number)
    histogram, counted = _histogram(given), 0
    seconds = Metric("c_seconds", HELP, "histogram")
    for bound, count in zip(("0.001", "0.5", "2.0", "+Inf"), histogram.counts, strict=True):
        counted += count
        seconds.add_sample("c_seconds_bucket", {"le": bound}, counted)
    seconds.add_sample("c_seconds_count", {}, counted)
    seconds.add_sample("c_seconds_sum", {}, histogram.total)
    return [metric for metric in (gauge, counter, seconds) if metric.samples]


@given(
    st.lists(
        # Labels are given in one order each time; Hypothesis gives a dictionary in any.
        st.tuples(LABELS.map(lambda labels: dict(sorted(labels.items()))), NUMBERS),
        max_size=8,
    )
)
def test_pages_say_what_the_library_would_say(given: Given) -> None:
    for openmetrics, encode in ((False, library_text), (True, library_openmetrics)):
        ours = _ours(given, openmetrics=openmetrics)
        theirs = encode(_Only(*_in_the_library(given)))
        assert parsed(ours, openmetrics=openmetrics) == parsed(theirs, openmetrics=openmetrics)


def test_a_label_that_is_none_is_none_and_a_long_one_is_cut() -> None:
    labels = label_text(a=None, b="x" * 10_000, c="x" * LONGEST)
    assert labels == f'b="{"x" * (LONGEST - 1)}…",c="{"x" * LONGEST}"'


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (True, "1"),
        (False, "0"),
        (-40_000, "-40000"),
        (0.1, "0.1"),
        (1 << 64, "1.8446744073709552e+19"),
        (10**400, None),
        (math.nan, None),
        (-math.inf, None),
    ],
)
def test_values(value: float | None, shown: str | None) -> None:
    page = _render([("", value)], openmetrics=False).decode()
    assert page == ("" if shown is None else f"# HELP x X.\n# TYPE x gauge\nx {shown}\n")


def test_a_series_that_is_there_already_is_left_out() -> None:
    samples = [(label_text(a="\ud800"), 1), (label_text(a="?"), 2), (label_text(a="!"), 3)]
    lines = _render(samples, openmetrics=False).decode().splitlines()
    assert lines[2:] == ['x{a="?"} 1', 'x{a="!"} 3']
