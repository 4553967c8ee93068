"""What is made of the requests that an API server had."""

from __future__ import annotations

import random

import pytest

from bench.fleet.agents import ILL, POOLS, WELL
from bench.fleet.outage import outage
from bench.fleet.run import Idle, Phase, kinds
from bench.fleet.server import Asked, most_nodes, peak


def asked(at: float, verb: str = "get", uri: str = "") -> Asked:
    return Asked(at=at, user="agents", verb=verb, what="nodes", code=200, uri=uri)


def test_a_node_that_asks_twice_within_a_second_counts_once() -> None:
    assert most_nodes([(0.0, "a"), (0.5, "a"), (0.9, "b"), (1.1, "b"), (1.2, "c")]) == 3
    assert most_nodes([(0.0, "a"), (0.5, "a"), (2.0, "b")]) == 1
    assert most_nodes([]) == 0


def test_a_node_is_found_in_the_uri() -> None:
    of_slices = "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3Dfleet-00012"
    assert asked(1.0, uri=of_slices).node == "fleet-00012"
    assert asked(1.0, uri="/api/v1/nodes/fleet-00012").node == "fleet-00012"
    events = [asked(at, uri="/api/v1/namespaces/default/events") for at in (1.0, 1.5)]
    assert len({one.node for one in events}) == 2


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
    phase = Phase([asked(at / 10) for at in range(50)], began=0.0, seconds=5.0, nodes=50)
    rates, each, took = (one.measured for one in phase.figures("a start"))
    assert rates == "11 / 5"
    assert each == "1: 1 get nodes"
    assert took == "5.0 s"


def test_the_return_is_the_api_server_s_own_start_and_what_comes_after() -> None:
    """Three nodes ask twice each within the first second, two of them once more after 20 s."""
    early = [asked(100.0 + at / 10, uri=f"/nodes/fleet-{at % 3:05}") for at in range(6)]
    late = [asked(at, uri=f"/nodes/fleet-{10 * at:05.0f}") for at in (120.0, 120.5)]
    phase = Phase([*early, *late], began=100.0, seconds=21.0, nodes=100)
    first, first_rates, then, then_rates = phase.returns("away")
    assert (first.measured, first.target) == ("3", "")
    assert (then.measured, then.target) == ("2", "<= 2")
    assert (first_rates.measured, then_rates.measured) == ("6 / 1", "2 / 0")


@pytest.mark.parametrize("partitions", [False, True])
def test_a_failed_card_changes_what_is_published(partitions: bool) -> None:
    """Else a fault of the bench would cost the API server an Event alone."""
    well, ill = POOLS[partitions, id(WELL)], POOLS[partitions, id(ILL)]
    assert well
    assert ill
    assert not any(one.taints for one in well)
    assert {one.device.card_id for one in ill if one.taints} == {ill[0].device.card_id}


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
    # In a second 2 % of the nodes, and by chance as many again where there are only 500.
    assert most_nodes(found.nodes) <= 2 * 500 / 50
