"""Rows of Nodes and holders, of objects alone."""

from __future__ import annotations

from typing import Any

import pytest

from npu_agent.kube.objects import Counters, SliceDevice
from npu_agent.people.cluster.fetch import AgentReports
from npu_agent.people.cluster.objects import Pod
from npu_agent.people.cluster.rows import (
    PublishedDevice,
    free_resource,
    holdings,
    node_rows,
    requests,
    to_ask,
)
from npu_agent.people.report import Report
from tests.people.cluster.build import (
    DAEMON_SET,
    NPU,
    WORDS,
    Json,
    agent,
    claims,
    cluster,
    cut,
    device,
    held,
    node,
    pod,
    read,
    slice_,
)


def container(count: int | str, **fields: Any) -> Json:
    limits = {NPU: str(count)} if count else {}
    return {"name": f"c{count}", "resources": {"limits": limits, "requests": limits}, **fields}


ALWAYS = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("main", "inits", "count"),
    [
        (1, [], 1),
        ("1k", [], 1000),
        (0, [container(2, **ALWAYS)], 2),
        (0, [container(1)], 1),
        (1, [container(2)], 2),
        (1, [container(1, **ALWAYS)], 2),
        (1, [container(1, **ALWAYS), container(3)], 4),
        (1, [container(3), container(1, **ALWAYS)], 3),
        (3, [container(1, **ALWAYS), container(1)], 4),
    ],
)
def test_sidecars_and_init_containers_count_as_the_scheduler_counts_them(
    main: int | str, inits: list[Json], count: int
) -> None:
    made = pod(containers=[container(main)], initContainers=inits, on="n1")
    assert requests(read(Pod, made)).get(NPU) == count
    labels = {"beta.furiosa.ai/npu.count": "2000", "beta.furiosa.ai/npu.family": "rngd"}
    (row,) = node_rows(cluster(node("n1", {NPU: "2k"}, labels=labels), made), WORDS)
    assert (row.allocated, row.free) == (8 * count, 16000 - 8 * count)
    assert [one.pod for one in holdings(cluster(made), WORDS, AgentReports())] == ["train"]


def test_a_pod_has_its_claims_by_name_by_template_and_for_extended_resources() -> None:
    wanted = [
        {"name": "a", "resourceClaimName": "mine"},
        {"name": "b", "resourceClaimTemplateName": "t"},
        {"name": "c", "resourceClaimTemplateName": "not-yet"},
    ]
    status = {
        "resourceClaimStatuses": [{"name": "b", "resourceClaimName": "p-b-x1"}],
        "extendedResourceClaimStatus": {
            "resourceClaimName": "p-extended-resources",
            "requestMappings": [{"containerName": "main", "resourceName": NPU}],
        },
    }
    made = pod("p", {NPU: "1"}, on="n1", resourceClaims=wanted, status=status)
    assert read(Pod, made).claims == ("mine", "p-b-x1", "p-extended-resources")
    assert holdings(cluster(made), WORDS, AgentReports()) == []  # it is no device plugin's


def test_the_agents_page_counts_cards_that_labels_do_not_tell() -> None:
    labels = {"beta.furiosa.ai/npu.count": "2", "beta.furiosa.ai/npu.family": "several"}
    there = cluster(node("n1", {NPU: "3"}, labels=labels))
    (row,) = node_rows(there, WORDS)
    assert row.cards is None
    holder = {"namespace": "ml", "pod": "user", "cores": "0-3"}
    cards: list[Json] = [
        {"name": "npu0", "family": "rngd", "core_count": 8, "holders": [holder]},
        {"name": "npu0", "family": "warboy", "core_count": 2},
        {"name": "npu1", "core_count": 2, "health": {"state": "unhealthy"}},
        {"name": "npu2", "core_count": 2, "cordoned": "fan"},
    ]
    (row,) = node_rows(there, WORDS, AgentReports({"n1": read(Report, {"cards": cards})}))
    assert (row.cards, row.healthy, row.cores, row.allocated) == (4, 3, 14, 4)
    assert (row.free, row.widest, row.api) == (6, None, "device-plugin")


def test_cards_of_two_families_with_one_number_are_two() -> None:
    slices = slice_("n1", device("a", index=0), device("b", 2, index=0, arch="warboy"))
    user = pod("user", on="n1", resourceClaims=claims(c="mine"))
    there = cluster(node("n1"), slices, held("mine", "n1", "b", by="user"), user)
    (row,) = node_rows(there, WORDS)
    assert (row.cards, row.cores, row.allocated, row.free) == (2, 10, 2, 8)
    (holding,) = holdings(there, WORDS, AgentReports())
    assert (holding.card, holding.family) == ("npu0", "warboy")


@pytest.mark.parametrize(
    "fields",
    [
        *({"attributes": {"cores": {"string": "8"}}}, {"attributes": {"cores": {"int": 10**9}}}),
        *({"attributes": {"cores": {"int": -1}}}, {"attributes": {"cores": {}}}),
        {"consumes_counters": (Counters({"core-²": {}, "core-99999": {}, "cores": {}}),)},
    ],
)
def test_a_slice_that_says_odd_things_costs_its_own_row_only(fields: Json) -> None:
    """A node's own account may write its slices; 10**9 cores took all memory."""
    odd = SliceDevice("npu0", **fields)
    assert PublishedDevice("d", "n1", odd).cores == {0}


def test_counters_say_which_cores_a_part_has() -> None:
    part = SliceDevice("npu0", consumes_counters=(Counters({"core-4": {}, "core-5": {}}),))
    assert PublishedDevice("d", "n1", part).cores == {4, 5}


WIDE, PART = "furiosa.ai/rngd", "furiosa.ai/rngd-4core.24gb"


@pytest.mark.parametrize(
    ("offered", "used", "resource"),
    [
        ({PART: "8", WIDE: "2"}, {}, WIDE),
        ({PART: "8", WIDE: "2"}, {WIDE: "2"}, PART),
        ({WIDE: "2"}, {WIDE: "2"}, None),
        ({WIDE: "0"}, {}, None),
        ({"nvidia.com/gpu": "8"}, {}, None),
    ],
)
def test_the_widest_resource_that_is_free(
    offered: dict[str, str], used: dict[str, str], resource: str | None
) -> None:
    here = cluster(
        node("n1", offered), pod(requests=used, on="n1"), pod("far", {WIDE: "2"}, on="n2")
    )
    assert free_resource(here, here.nodes[0], WORDS) == resource


def test_a_claim_gets_a_whole_card_and_no_part_of_one() -> None:
    (slices,) = cut("n1", "npu0", "npu1")
    tainted = [
        device | {"taints": [{"key": "x/unhealthy", "effect": "NoSchedule"}]}
        for device in slices["spec"]["devices"]
        if device["name"] == "npu1"
    ]
    there = [node("n1"), slice_("n1", *slices["spec"]["devices"][:15], *tainted)]
    free = cluster(*there)
    assert free_resource(free, free.nodes[0], WORDS) == ""
    used = cluster(*there, held("part", "n1", "npu0-cores-4-7", by="job"))
    assert free_resource(used, used.nodes[0], WORDS) is None


def test_a_resource_of_another_domain_is_an_npu_where_the_agents_page_says_so() -> None:
    name = "example.com/npu"
    there = cluster(
        DAEMON_SET, agent("a", "n1"), node("n1", {name: "2"}), pod("user", {name: "1"}, on="n1")
    )
    (row,) = node_rows(there, WORDS)
    assert (row.cards, row.allocated, row.free) == (None, None, None)
    assert free_resource(there, there.nodes[0], WORDS) is None
    assert to_ask(there, WORDS) == {"n1"}
    cards = [{"name": f"npu{at}", "family": "rngd", "core_count": 8} for at in range(2)]
    page = read(Report, {"cards": cards, "resources": [{"resource": name}]})
    (row,) = node_rows(there, WORDS, AgentReports({"n1": page}))
    assert (row.cards, row.cores, row.api) == (2, 16, "device-plugin")
    assert free_resource(there, there.nodes[0], WORDS, page) == name
    gpus = read(Report, {"cards": []})
    (row,) = node_rows(there, WORDS, AgentReports({"n1": gpus}))
    assert row.cards == 0, "another plugin's"
