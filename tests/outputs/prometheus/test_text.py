"""Labels, definitions and rendering, compared with prometheus_client's own encoder and parsers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest as library_text
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as library_openmetrics
from prometheus_client.registry import Collector

from npu_agent.core.counts import Histogram
from npu_agent.outputs.prometheus.text import LONGEST, NONE, Definition, Labels, finite, render
from tests.outputs.prometheus.helpers import parsed

TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
"""Lone surrogates among them."""
NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.just(10**400), st.none())


class _Only(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self.metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self.metrics


def _metric(
    samples: Callable[[None], Any], name: str = "x", kind: Any = "gauge", help_: str = "X."
) -> Metric:
    definition: Definition[None] = Definition(name=name, kind=kind, help=help_, samples=samples)
    return definition.metric(None)


def _families(samples: list[tuple[Labels, float | None]]) -> list[Metric]:
    counts = [(labels, abs(value or 0)) for labels, value in samples]
    histogram = Histogram((0.001, 0.5, 2))
    for _, value in samples:
        if (number := finite(value)) is not None:
            histogram.add(abs(number))
    help_ = 'A "help" with \\ and\nmore.'
    return [
        _metric(lambda _: samples, "a_gauge", "gauge", help_),
        _metric(lambda _: counts, "b_things_total", "counter", help_),
        _metric(lambda _: [(NONE, histogram)], "c_seconds", "histogram", help_),
    ]


@given(
    st.lists(
        st.tuples(
            st.builds(lambda a, b: Labels(a=a, b=b), TEXTS, st.one_of(TEXTS, st.none())), NUMBERS
        ),
        max_size=8,
    )
)
def test_pages_say_what_the_library_would_say(samples: list[tuple[Labels, float | None]]) -> None:
    families = [metric for metric in _families(samples) if metric.samples]
    for openmetrics, encode in ((False, library_text), (True, library_openmetrics)):
        ours = b"".join(render(metric, openmetrics=openmetrics) for metric in families)
        ours += b"# EOF\n" if openmetrics else b""
        theirs = encode(_Only(*families))
        assert parsed(ours, openmetrics=openmetrics) == parsed(theirs, openmetrics=openmetrics)


def test_hostile_label_values_become_one_valid_line() -> None:
    labels = Labels(a='quote " backslash \\ newline \n', b="lone \ud800 surrogate", c="°C…")
    assert labels.text == ('a="quote \\" backslash \\\\ newline \\n",b="lone ? surrogate",c="°C…"')
    assert labels["a"] == 'quote " backslash \\ newline \n'


def test_a_label_that_is_none_is_none_and_a_long_one_is_cut() -> None:
    labels = Labels(a=None, b="x" * 10_000, c="x" * LONGEST)
    assert list(labels) == ["b", "c"]
    assert labels["b"] == "x" * (LONGEST - 1) + "…"
    assert labels["c"] == "x" * LONGEST


def test_plus_leaves_the_labels_it_came_from_alone() -> None:
    base = Labels(a="1")
    more = base.plus(b="2").plus(c=None, d="4")
    assert (dict(base), base.text) == ({"a": "1"}, 'a="1"')
    assert (dict(more), more.text) == ({"a": "1", "b": "2", "d": "4"}, 'a="1",b="2",d="4"')
    assert NONE.plus(a="1").text == 'a="1"'


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
    metric = _metric(lambda _: [(NONE, value)])
    page = render(metric, openmetrics=False).decode()
    assert page == ("" if shown is None else f"# HELP x X.\n# TYPE x gauge\nx {shown}\n")


def test_a_series_that_is_there_already_is_left_out() -> None:
    samples = [(Labels(a="\ud800"), 1), (Labels(a="?"), 2), (Labels(a="!"), 3)]
    metric = _metric(lambda _: samples)
    assert [sample.value for sample in metric.samples] == [1, 3]


def test_buckets_add_up_and_have_canonical_bounds() -> None:
    seconds = Histogram((0.25, 1, 2.5))
    for number in (0.125, 0.25, 0.75, 3, 4):
        seconds.add(number)
    metric = _metric(lambda _: [(NONE, seconds)], "x_seconds", "histogram")
    assert render(metric, openmetrics=True).decode().splitlines()[2:] == [
        'x_seconds_bucket{le="0.25"} 2',
        'x_seconds_bucket{le="1.0"} 3',
        'x_seconds_bucket{le="2.5"} 3',
        'x_seconds_bucket{le="+Inf"} 5',
        "x_seconds_count 5",
        "x_seconds_sum 8.125",
    ]


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_counter_is_named_as_each_format_wants_it(
    openmetrics: bool,
) -> None:
    metric = _metric(lambda _: [(NONE, 3)], "x_total", "counter")
    name = "x" if openmetrics else "x_total"
    assert render(metric, openmetrics=openmetrics).decode() == (
        f"# HELP {name} X.\n# TYPE {name} counter\nx_total 3\n"
    )
