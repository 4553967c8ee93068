"""A card dies under its Pod: what the scheduler, the kubelet and the Pod's owner see of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from npu_agent.config.schema import HealthConfig
from tests.e2e.dra.claims import CONFIG, devices, run, said, seen, taints, verified
from tests.e2e.manifests import DRIVER, claim_pod, request, selected, small, template
from tests.e2e.node import Node

pytestmark = pytest.mark.since("1.36")
DEFAULT = HealthConfig()
NOTICED = DEFAULT.failures * DEFAULT.interval + 1.5
UNHEALTHY = f"{DRIVER}/unhealthy"


def health(node: Node, name: str) -> dict[str, Any]:
    """What the Pod's status says of its one device."""
    (status,) = node.pod(name)["status"]["containerStatuses"]
    (resource,) = status["allocatedResourcesStatus"]
    assert resource["name"] == "claim:npus"
    (device,) = resource["resources"]
    return dict(device)


def is_now(node: Node, name: str, state: str) -> bool:
    found = health(node, name)
    assert found["health"] == state, found
    assert state == "Healthy" or "says 0" in found["message"], found
    return True


def seconds(node: Node, what: str, condition: Callable[[], bool], since: float) -> float:
    """When a condition came true."""
    node.wait_for(what, condition)
    return time.monotonic() - since


def test_a_card_dies_under_its_pod_and_recovers(node: Node, kill: Callable[[int], None]) -> None:
    run(node, claim_pod("victim"))
    (card,) = verified(node, "victim", 1).cards
    node.wait_for("its health", lambda: is_now(node, "victim", "Healthy"))

    kill(card)
    dead = time.monotonic()
    tainted = seconds(node, "a taint", lambda: taints(node, card) != {}, dead)
    told = seconds(node, "the Pod's status", lambda: is_now(node, "victim", "Unhealthy"), dead)
    print(f"a dead card: taint after {tainted:.2f} s, the Pod's status after {told:.2f} s")
    assert taints(node, card) == {UNHEALTHY: "NoSchedule"}
    assert max(tainted, told) < NOTICED
    # The scheduler gives it to nobody, and the Pod keeps it.
    made = template("seven", request(count=7))
    run(node, made, small("others", of_template="seven"))
    assert card not in seen(node, "others").cards
    assert node.restarts()["victim"] == 0

    node.fault("ok", f"npu{card}")
    node.wait_for("no taint", lambda: taints(node, card) == {})
    node.wait_for("the Pod's status", lambda: is_now(node, "victim", "Healthy"))
    assert node.restarts()["victim"] == 0


def test_a_degraded_card_is_given_last_and_a_claim_can_exclude_it(node: Node) -> None:
    node.fault("narrow", "npu2")
    try:
        degraded = {"string": "link"}
        node.wait_equal(
            "its attribute", lambda: devices(node)[2]["attributes"].get("degraded"), degraded
        )
        assert taints(node, 2) == {f"{DRIVER}/link": "None"}
        run(node, claim_pod("first"))
        assert verified(node, "first", 1).cards == {3}, "npu2 would be the first one"
        good = request(count=6, **selected('?degraded.orValue("") == ""'))
        run(node, template("good", good), small("others", of_template="good"))
        assert seen(node, "others").cards == {0, 1, 4, 5, 6, 7}
        run(node, claim_pod("last"))
        assert verified(node, "last", 1).cards == {2}, "it stays in service"
    finally:
        node.fault("ok", "npu2")


def test_a_pod_is_evicted_if_the_config_says_so(node: Node, kill: Callable[[int], None]) -> None:
    run(node, claim_pod("victim"), claim_pod("bystander"))
    (card,) = verified(node, "victim", 1).cards
    uid = node.pod("victim")["metadata"]["uid"]
    kill(card)
    node.wait_for("a taint", lambda: taints(node, card) != {})
    assert taints(node, card) == {UNHEALTHY: "NoSchedule"}

    node.configure({**CONFIG, "health": {"evict": True, "evictAfter": 2}})
    try:

        def evicted() -> bool:
            return uid not in {one["metadata"]["uid"] for one in node.objects("pod", "default")}

        node.wait_for("the Pod to be evicted", evicted)
        assert taints(node, card) == {UNHEALTHY: "NoExecute"}
        said(node, "victim", "Marking for deletion")
        verified(node, "bystander", 1)
    finally:
        node.configure(CONFIG)
