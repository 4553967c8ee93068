"""What Pods can ask for by claims, and what their containers are given."""

from __future__ import annotations

import json

from tests.e2e.dra.claims import (
    DRIVER,
    Seen,
    allocated,
    claim,
    claim_of,
    devices,
    pod,
    prepared,
    request,
    run,
    running,
    said,
    seen,
    slices,
    small,
    specs,
    template,
    verified,
    waits,
    wanted,
)
from tests.e2e.dra.conftest import unprepared
from tests.e2e.node import SOON, Node

ADMINS = "npu-admins"


def test_the_cards_are_published_once(node: Node) -> None:
    (only,) = slices(node)
    assert only["spec"]["pool"]["name"] == node.name
    kinds = [one["attributes"]["arch"]["string"] for _, one in sorted(devices(node).items())]
    assert kinds == ["warboy"] * 2 + ["rngd"] * 6
    # And by DRA alone.
    assert not node.allocatable()


def test_a_pod_of_a_template_runs_and_ends(node: Node) -> None:
    run(node, pod("one"))
    found = verified(node, "one", 1)
    (device,) = allocated(node, "one")
    (card,) = found.cards
    assert devices(node)[card]["name"] == device
    claim = claim_of(node, "one")
    assert prepared(node) == {f"default/{claim['metadata']['name']}"}
    assert specs(node) == {f"furiosa.ai-claim-{claim['metadata']['uid']}.json"}
    node.delete_pods("one")
    unprepared(node)


def test_a_claim_outlives_its_pods(node: Node) -> None:
    run(node, claim("mine"), pod("first", of_claim="mine"))
    cards = verified(node, "first", 1).cards
    assert prepared(node) == {"default/mine"}
    node.delete_pods("first")
    unprepared(node)
    # Its allocation ends with its last Pod, and it is allocated anew for the next one.
    run(node, pod("second", of_claim="mine"))
    assert verified(node, "second", 1).cards == cards
    assert allocated(node, "second") == [devices(node)[min(cards)]["name"]]


def test_two_containers_share_a_claim_and_a_third_has_none(node: Node) -> None:
    use = ({"name": "npus"},)
    run(node, pod("shared", containers={"server": use, "profiler": use, "sidecar": ()}))
    server, profiler = (verified(node, "shared", 1, name) for name in ("server", "profiler"))
    assert server == profiler
    assert seen(node, "shared", "sidecar") == Seen(frozenset(), {})


def test_two_pods_share_a_claim(node: Node) -> None:
    run(node, claim("ours"), pod("one", of_claim="ours"), pod("two", of_claim="ours"))
    assert verified(node, "one", 1) == verified(node, "two", 1)
    node.delete_pods("one")
    # It is prepared for as long as one of them is there.
    assert prepared(node) == {"default/ours"}
    verified(node, "two", 1)


def test_each_container_gets_its_requests(node: Node) -> None:
    requests = (request("model", arch="rngd", count=2), request("draft", arch="warboy"))
    both = ({"name": "npus", "request": "model"}, {"name": "npus", "request": "draft"})
    containers = {"model": both[:1], "draft": both[1:], "both": both, "all": ({"name": "npus"},)}
    run(node, template("two", *requests), pod("several", of_template="two", containers=containers))
    model = verified(node, "several", 2, "model")
    draft = verified(node, "several", 1, "draft")
    assert model.cards <= set(range(2, 8))
    assert draft.cards <= {0, 1}
    # A container that has both sees the nodes of both; its variables are those of one of them.
    for container in ("both", "all"):
        found = seen(node, "several", container)
        assert found.nodes == model.nodes | draft.nodes
        assert found.environment in (model.environment, draft.environment)


def test_cards_of_one_numa_node(node: Node) -> None:
    # The cards 0, 1, 4 and 5 are on the node 0, and 2, 3, 6 and 7 on the other one.
    constraint = {"requests": ["npu"], "matchAttribute": f"{DRIVER}/numaNode"}
    made = template("pair", request(arch="rngd", count=2), constraints=[constraint])
    run(node, made, pod("three", of_template="pair"), pod("four", of_template="pair"))
    pairs = [verified(node, name, 2).cards for name in ("three", "four")]
    numa = [{devices(node)[card]["attributes"]["numaNode"]["int"] for card in at} for at in pairs]
    assert [len(each) for each in numa] == [1, 1]
    assert not pairs[0] & pairs[1]
    # Two cards are left, and three of one node are not among them.
    more = template("more", request(arch="rngd", count=3), constraints=[constraint])
    node.cluster.apply([more, pod("five", of_template="more")])
    waits(node, "five")


def test_claims_that_name_no_family_get_rngd_first(node: Node) -> None:
    """As the vendor's examples for its driver, which offers RNGD only."""
    # Without an order, the Warboys 0 and 1 and the RNGD 4 and 5 are the first four of one node.
    constraint = {"requests": ["npu"], "matchAttribute": f"{DRIVER}/numaNode"}
    four = template("four", request(count=4), constraints=[constraint])
    run(node, four, pod("four", of_template="four"))
    assert verified(node, "four", 4).cards == {2, 3, 6, 7}
    run(node, pod("single"))
    assert verified(node, "single", 1).cards == {4}
    # Warboys are given when no RNGD is left.
    run(node, template("two", request(count=2)), pod("two", of_template="two"))
    assert verified(node, "two", 2).cards == {5, 0}


def test_the_first_kind_that_is_available(node: Node) -> None:
    either = {
        "name": "npu",
        "firstAvailable": [{"name": arch, **wanted(arch)} for arch in ("rngd", "warboy")],
    }
    run(node, template("either", either), pod("rngd", of_template="either"))
    assert verified(node, "rngd", 1).cards <= set(range(2, 8))
    run(node, template("five", request(arch="rngd", count=5)), small("five", of_template="five"))
    named = {"main": ({"name": "npus", "request": "npu"},)}  # by the name of the whole request
    run(node, pod("warboy", of_template="either", containers=named))
    assert verified(node, "warboy", 1).cards <= {0, 1}


def test_an_administrator_beside_the_holder(node: Node) -> None:
    run(node, pod("holder"))
    (card,) = verified(node, "holder", 1).cards
    meta = {"name": ADMINS, "labels": {"resource.kubernetes.io/admin-access": "true"}}
    all_cards = {
        "name": "npu",
        "exactly": {**wanted(), "allocationMode": "All", "adminAccess": True},
    }
    node.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
    try:
        node.cluster.wait_for(
            "the namespace's account",
            lambda: node.cluster.kubectl("get", "serviceaccount", "default", "-n", ADMINS),
            SOON,
        )
        run(
            node,
            template("all", all_cards, namespace=ADMINS),
            pod("admin", of_template="all", namespace=ADMINS),
        )
        assert verified(node, "admin", 8, namespace=ADMINS).cards == set(range(8))
        # It keeps nobody from anything: the seven other cards can be claimed.
        run(node, template("seven", request(count=7)), small("seven", of_template="seven"))
        assert seen(node, "seven").cards == set(range(8)) - {card}
    finally:
        node.cluster.kubectl("delete", "namespace", ADMINS, "--timeout=60s")
    # Nor does it take anything with it.
    verified(node, "holder", 1)


def test_an_allocation_by_hand_of_a_card_that_a_pod_holds(node: Node) -> None:
    run(node, pod("holder"))
    (device,) = allocated(node, "holder")
    result = {"request": "npu", "driver": DRIVER, "pool": node.name, "device": device}
    here = {"key": "metadata.name", "operator": "In", "values": [node.name]}
    allocation = {
        "allocationTimestamp": "2026-01-01T00:00:00Z",  # the scheduler would change one without
        "devices": {"results": [result]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [here]}]},
    }
    patch = json.dumps({"status": {"allocation": allocation}})
    node.cluster.apply([claim("by-hand")])
    target = ("resourceclaim", "by-hand", "--namespace", "default", "--subresource=status")
    node.cluster.kubectl("patch", *target, "--type=merge", "--patch", patch)
    node.cluster.apply(pod("next", of_claim="by-hand"))
    # It is waited for a while, and then the user reads who holds the card.
    text = said(node, "next", "is not free")
    assert "Pod default/holder (ResourceClaim default/holder-npus-" in text
    assert "still holds its cores" in text
    held = verified(node, "holder", 1).cards
    node.delete_pods("holder")
    running(node, "next", timeout=2 * SOON)
    assert verified(node, "next", 1).cards == held


def test_a_pod_waits_for_a_card(node: Node) -> None:
    run(node, template("all", request(count=8)), small("all", of_template="all"))
    node.cluster.apply(pod("next"))
    waits(node, "next")
    node.delete_pods("all")
    running(node, "next")
    verified(node, "next", 1)
