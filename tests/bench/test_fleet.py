"""What is made of the requests that an API server had."""

from __future__ import annotations

import random

import pytest

from bench.fleet.outage import outage
from bench.fleet.run import Idle, Phase, kinds
from bench.fleet.server import Asked, peak


def asked(at: float, verb: str = "get", uri: str = "") -> Asked:
    return Asked(at=at, user="agents", verb=verb, what="nodes", code=200, uri=uri)


@pytest.mark.parametrize(("seconds", "most"), [(1.0, 3), (10.0, 5), (0.1, 2)])
def test_a_peak_is_found_wherever_it_is(seconds: float, most: int) -> None:
    times = (0.0, 4.0, 4.05, 4.9, 9.0, 20.0)
    assert peak(times, seconds) == most


def test_kinds_are_of_a_node() -> None:
    found = [asked(0.0), asked(1.0), asked(2.0, "watch"), asked(3.0, "get")]
    assert kinds(found, 2) == "2: 1.5 get nodes, 0.5 watch nodes"
    assert kinds([], 2) == "0"


def test_renewals_of_watches_count_though_the_window_has_none() -> None:
    """Two watches of 450 s each are 16 requests an hour; a read in a minute of 10 nodes is 6."""
    watches = [asked(0.0, "watch", f"/nodes?timeoutSeconds={life}") for life in (300, 600)]
    idle = Idle([asked(5.0)], watches, seconds=60.0, cpu=0.6, nodes=10)
    computed, counted, writes, cpu = (one.measured for one in idle.figures("agents"))
    assert computed == "22.0"
    assert counted == "6.0, 1 in all"
    assert (writes, cpu) == ("0", "1.0 %")


def test_rates_are_of_a_second_and_of_ten() -> None:
    phase = Phase([asked(at / 10) for at in range(50)], seconds=5.0, nodes=50)
    rates, each, took = (one.measured for one in phase.figures("a start"))
    assert rates == "11 / 5"
    assert each == "1: 1 get nodes"
    assert took == "5.0 s"


@pytest.mark.parametrize("seconds", [300.0, 1000.0])
def test_after_a_long_outage_all_nodes_are_back_evenly_and_within_three_minutes(
    seconds: float,
) -> None:
    random.seed(1)
    found = outage(500, seconds)
    assert len(found.asked) == 3 * 500
    assert max(found.asked) <= 180.0
    # As many as 5,000 nodes at 100 requests a second, with half as many again by chance.
    assert peak(found.asked, 20.0) <= 1.5 * 20 * 10
