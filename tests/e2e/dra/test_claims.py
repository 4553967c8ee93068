"""What Pods can ask for by claims, and what their containers are given."""

from __future__ import annotations

from tests.e2e.dra.claims import (
    allocated,
    claim_of,
    devices,
    pod,
    prepared,
    run,
    slices,
    specs,
    verified,
)
from tests.e2e.dra.conftest import unprepared
from tests.e2e.node import RESOURCE, Node


def test_the_cards_are_published_once(node: Node) -> None:
    (only,) = slices(node)
    assert only["spec"]["pool"]["name"] == node.name
    kinds = [one["attributes"]["arch"]["string"] for _, one in sorted(devices(node).items())]
    assert kinds == ["warboy"] * 2 + ["rngd"] * 6
    # And by DRA alone.
    assert RESOURCE not in node.cluster.get("node", node.name)["status"]["capacity"]


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
