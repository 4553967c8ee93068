"""DRA beside others: another driver in the same claim, the device plugin on the same node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import pytest

from tests.e2e.api import ADMIN
from tests.e2e.dra.claims import (
    CONFIG,
    Thing,
    devices,
    inside,
    pod,
    prepared,
    request,
    run,
    running,
    template,
    verified,
)
from tests.e2e.dra.conftest import OVERLAY, unprepared
from tests.e2e.dra.second import SECOND, VARIABLE, offer, second_driver
from tests.e2e.node import IMAGE, RESOURCE, SOON, Node
from tests.e2e.test_main_road import unschedulable

OTHER = "test.npu/warboy"
"""The resource of the Warboys where RNGD are offered by DRA."""
RUNS = 20


@pytest.fixture
def deployed(node: Node) -> Iterator[Callable[[Thing], None]]:
    """Deploys the agent with another config, until the test has ended."""
    yield lambda config: node.deploy(config, OVERLAY)
    node.delete_pods()
    node.deploy(CONFIG, OVERLAY)


def plain(name: str, resource: str = RESOURCE) -> Thing:
    """A Pod that asks the device plugin for one card."""
    made = pod(name, image=IMAGE)
    del made["spec"]["resourceClaims"]
    made["spec"]["containers"][0]["resources"] = {"limits": {resource: "1"}}
    return made


def test_a_claim_for_devices_of_two_drivers(node: Node) -> None:
    other = {"name": "other", "exactly": {"deviceClassName": SECOND}}
    both = template("both", request(), other)
    with second_driver(node) as held:
        node.cluster.apply([*offer(node), both])
        try:
            run(node, pod("both", of_template="both"))
            verified(node, "both", 1)
            assert inside(node.cluster, "both", "printenv", VARIABLE).strip() in ("a", "b")
            (uid,) = held
            run(node, pod("both-2", of_template="both"), pod("ours"))
            cards = [verified(node, name, 1).cards for name in ("both", "both-2", "ours")]
            assert len({card for each in cards for card in each}) == 3
            assert len(prepared(node)) == 3
            assert len(held) == 2
            assert uid in held
            node.delete_pods()
            unprepared(node)
            node.cluster.wait_for("the other driver to be asked too", lambda: not held, SOON)
        finally:
            for thing in offer(node):
                node.cluster.kubectl("delete", thing["kind"], thing["metadata"]["name"])


def test_warboys_by_the_device_plugin_and_rngd_by_claims(
    node: Node, deployed: Callable[[Thing], None]
) -> None:
    warboys = {"family": "warboy", "name": OTHER, "api": "device-plugin"}
    deployed({**CONFIG, "resources": [warboys, {"family": "rngd", "name": RESOURCE}]})

    def offered() -> bool:
        assert sorted(devices(node)) == [2, 3, 4, 5, 6, 7]
        allocatable = node.cluster.get("node", node.name)["status"]["allocatable"]
        assert allocatable[OTHER] == "2", allocatable
        return True

    node.cluster.wait_for("each kind to be offered once", offered, 2 * SOON)
    run(node, plain("one", OTHER), plain("two", OTHER), pod("claims"))
    warboy = [verified(node, name, 1).cards for name in ("one", "two")]
    assert sorted(warboy, key=min) == [{0}, {1}]
    assert verified(node, "claims", 1).cards <= set(range(2, 8))


def test_all_cards_change_hands_and_pods_keep_theirs(
    node: Node, deployed: Callable[[Thing], None]
) -> None:
    run(node, pod("by-claim"))
    (claimed,) = verified(node, "by-claim", 1).cards
    deployed({"allocation": {"api": "device-plugin"}})

    def left() -> bool:
        found = devices(node)
        assert list(found) == [claimed], sorted(found)
        return bool(found[claimed].get("taints"))

    node.cluster.wait_for("all cards to have left but the one that is held", left, 2 * SOON)
    node.wait_allocatable(7, 2 * SOON)
    run(node, plain("by-plugin"))
    (granted,) = verified(node, "by-plugin", 1).cards
    assert granted != claimed
    assert verified(node, "by-claim", 1).cards == {claimed}
    by_plugin = timed(node, plain)
    # A claim has nothing to choose from, and ends all the same.
    node.delete_pods("by-claim")
    unprepared(node)
    node.wait_allocatable(8, 2 * SOON)

    node.deploy(CONFIG, OVERLAY)

    def back() -> bool:
        found = devices(node)
        assert set(found) == set(range(8)) - {granted}, sorted(found)
        return not any(device.get("taints") for device in found.values())

    node.cluster.wait_for("all cards to be back but the one that is held", back, 2 * SOON)
    node.cluster.apply(plain("late"))
    unschedulable(node, "late")
    run(node, template("seven", request(count=7)), pod("seven", of_template="seven"))
    assert verified(node, "seven", 7).cards == set(range(8)) - {granted}
    assert verified(node, "by-plugin", 1).cards == {granted}
    node.delete_pods("seven", "late")
    unprepared(node)
    by_claim = timed(node, pod)
    print(f"Pod created -> Running, {RUNS} each, median and longest:")
    for name, took in (("device plugin", by_plugin), ("DRA", by_claim)):
        print(f"  {name:13} {median(took):.2f} s {max(took):.2f} s")
    # Both wait for the kubelet's look at its containers once a second: no worse than one of them.
    assert median(by_claim) < median(by_plugin) + 1


def timed(node: Node, make: Callable[[str], Thing]) -> list[float]:
    """Seconds from creation to Running of so many Pods, one after the other."""
    took = []
    for at in range(RUNS):
        thing = make(f"timed-{at}")
        # Time to end, or its card would be the next one's before its container has ended.
        thing["spec"]["terminationGracePeriodSeconds"] = 1
        started = time.monotonic()
        path = "/api/v1/namespaces/default/pods"
        assert node.cluster.request("POST", path, thing, token=ADMIN).status == 201
        running(node, f"timed-{at}")
        took.append(time.monotonic() - started)
        node.cluster.kubectl("delete", "pod", f"timed-{at}", "--wait=false")
    return took
