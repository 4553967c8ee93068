"""What Pods can ask for by claims, and what their containers are given."""

from __future__ import annotations

import re

from tests.e2e.dra.claims import (
    Seen,
    allocated,
    claim_of,
    devices,
    prepared,
    run,
    seen,
    slices,
    specs,
    verified,
)
from tests.e2e.dra.conftest import unprepared
from tests.e2e.manifests import DRIVER, NPUS, claim, claim_pod, request, template
from tests.e2e.node import Node


def test_the_cards_are_published_once(node: Node) -> None:
    (only,) = slices(node)
    assert only["spec"]["pool"]["name"] == node.name
    kinds = [one["attributes"]["arch"]["string"] for _, one in sorted(devices(node).items())]
    assert kinds == ["warboy"] * 2 + ["rngd"] * 6
    # And by DRA alone.
    assert not node.allocatable()


def test_a_pod_of_a_template_runs_and_ends(node: Node) -> None:
    run(node, claim_pod("one"))
    found = verified(node, "one", 1)
    (device,) = allocated(node, "one")
    (card,) = found.cards
    assert devices(node)[card]["name"] == device
    claim = claim_of(node, "one")
    assert prepared(node) == {f"default/{claim['metadata']['name']}"}
    assert specs(node) == {f"furiosa.ai-claim-{claim['metadata']['uid']}.json"}
    node.wait_for("its holder on /metrics", lambda: claim["metadata"]["name"] in held(node, "one"))
    node.delete_pods("one")
    unprepared(node)


def held(node: Node, pod: str) -> set[str]:
    """The claims by which /metrics has cores held by this Pod."""
    series = re.findall(r"\bfuriosa_npu_assigned\{(.*)\} ", node.page("/metrics"))
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', labels)) for labels in series]
    return {each["claim"] for each in labels if each["pod"] == pod}


def test_a_claim_outlives_its_pods(node: Node) -> None:
    run(node, claim("mine"), claim_pod("first", of_claim="mine"))
    verified(node, "first", 1)
    assert prepared(node) == {"default/mine"}
    node.delete_pods("first")
    unprepared(node)
    # Its allocation ends with its last Pod, and it is allocated anew for the next one.
    run(node, claim_pod("second", of_claim="mine"))
    (card,) = verified(node, "second", 1).cards
    assert allocated(node, "second") == [devices(node)[card]["name"]]


def test_two_containers_share_a_claim_and_a_third_has_none(node: Node) -> None:
    run(node, claim_pod("shared", containers={"server": NPUS, "profiler": NPUS, "sidecar": ()}))
    server, profiler = (verified(node, "shared", 1, name) for name in ("server", "profiler"))
    assert server == profiler
    assert seen(node, "shared", "sidecar") == Seen(frozenset(), {})


def test_two_pods_share_a_claim(node: Node) -> None:
    run(node, claim("ours"), claim_pod("one", of_claim="ours"), claim_pod("two", of_claim="ours"))
    assert verified(node, "one", 1) == verified(node, "two", 1)
    node.delete_pods("one")
    # It is prepared for as long as one of them is there.
    assert prepared(node) == {"default/ours"}
    verified(node, "two", 1)


def test_each_container_gets_its_requests(node: Node) -> None:
    requests = (request("model", arch="rngd", count=2), request("draft", arch="warboy"))
    both = ({"name": "npus", "request": "model"}, {"name": "npus", "request": "draft"})
    containers = {"model": both[:1], "draft": both[1:], "both": both, "all": NPUS}
    run(
        node,
        template("two", *requests),
        claim_pod("several", of_template="two", containers=containers),
    )
    model = verified(node, "several", 2, "model")
    draft = verified(node, "several", 1, "draft")
    assert model.cards <= set(range(2, 8))
    assert draft.cards <= {0, 1}
    # A container that has both sees the nodes of both; its variables are those of one of them.
    for container in ("both", "all"):
        found = seen(node, "several", container)
        assert found.nodes == model.nodes | draft.nodes
        assert found.environment in (model.environment, draft.environment)


def test_claims_that_name_no_family_get_rngd_first(node: Node) -> None:
    """As the vendor's examples for its driver, which offers RNGD only."""
    # Without an order, the Warboys 0 and 1 and the RNGD 4 and 5 are the first four of one node.
    constraint = {"requests": ["npu"], "matchAttribute": f"{DRIVER}/numaNode"}
    four = template("four", request(count=4), constraints=[constraint])
    run(node, four, claim_pod("four", of_template="four"))
    assert verified(node, "four", 4).cards == {2, 3, 6, 7}
    run(node, claim_pod("single"))
    assert verified(node, "single", 1).cards == {4}
    # Warboys are given when no RNGD is left.
    run(node, template("two", request(count=2)), claim_pod("two", of_template="two"))
    assert verified(node, "two", 2).cards == {5, 0}
