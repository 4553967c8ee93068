"""One card is taken out of service by DRA, drained and brought back."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import pytest

from tests.e2e.dra.claims import run, seen, taints, verified
from tests.e2e.dra.test_resource_names import old
from tests.e2e.manifests import DRIVER, RESOURCE, claim_pod, request, small, template
from tests.e2e.node import Node
from tests.e2e.test_cordon import FOLLOWED, annotate

CORDONED = {f"{DRIVER}/cordoned": "NoSchedule"}


@pytest.fixture(autouse=True)
def uncordoned(node: Node) -> Iterator[None]:
    yield
    annotate(node, None)


def drained(node: Node, card: int, pod: str) -> None:
    """Drains a card that this Pod holds; the Pod `bystander` stays as it is."""
    words = ("-m", "npu_agent", "drain", f"npu{card}", "--node", node.name, "--reason", "swap fan")
    done = node.cluster.enter(sys.executable, *words, "--timeout=60")
    assert f"evicted default/{pod}" in done.stdout
    assert f"npu{card} is free and can be reset" in done.stdout
    assert [one["metadata"]["name"] for one in node.objects("pod", "default")] == ["bystander"]
    assert node.restarts() == {"bystander": 0}


def test_a_cordoned_card_is_in_no_new_claim_and_a_drain_frees_it(node: Node) -> None:
    run(node, claim_pod("kept"), claim_pod("bystander"))
    (card,) = verified(node, "kept", 1).cards
    annotate(node, json.dumps({f"npu{card}": "swap fan"}))
    began = time.monotonic()
    node.wait_for("a taint", lambda: taints(node, card) == CORDONED)
    took = time.monotonic() - began
    print(f"from the annotation to the taint: {took:.2f} s")
    assert took < FOLLOWED
    made = template("six", request(count=6))
    run(node, made, small("others", of_template="six"))
    assert card not in seen(node, "others").cards
    node.delete_pods("others")
    node.restart()
    assert taints(node, card) == CORDONED
    assert node.restarts() == {"kept": 0, "bystander": 0}

    drained(node, card, "kept")
    annotate(node, None)
    node.wait_for("no taint", lambda: taints(node, card) == {})


@pytest.mark.since("1.36")
@pytest.mark.usefixtures("classes")
def test_a_drain_evicts_a_pod_that_asked_by_a_resource_name(node: Node) -> None:
    """Its claim is not in its spec: the cluster's taint controller does not evict it."""
    run(node, old("named", {RESOURCE: "1"}), claim_pod("bystander"))
    (card,) = verified(node, "named", 1, "c0").cards
    drained(node, card, "named")
