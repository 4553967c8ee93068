"""A card of one node dies, and its Pod runs again on the other node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.dra.claims import run
from tests.e2e.dra.test_evictions import (
    AFTER,
    PLUGIN,
    holder,
    of_app,
    of_deployment,
    of_job,
    of_stateful_set,
    runs_again,
    tainted,
    waits,
)
from tests.e2e.manifests import Thing, npu_pod, small
from tests.e2e.node import SOON, Node
from tests.e2e.two_nodes.conftest import well

pytestmark = [pytest.mark.since("1.36"), pytest.mark.usefixtures("bystanders")]
NODE_OF_TOKEN = "authentication.kubernetes.io/node-name"


@pytest.fixture
def bystanders(node: Node, other: Node) -> Iterator[None]:
    """Pods on a card of each kind on both nodes, which are the same Pods after the test."""
    for each in (node, other):
        here = {"kubernetes.io/hostname": each.name}
        run(
            each,
            npu_pod(f"plugin-on-{each.name}", resource=PLUGIN, nodeSelector=here),
            small(f"claim-on-{each.name}", nodeSelector=here),
        )
    uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods(node)}
    assert len(uids) == 4
    yield
    after = {pod["metadata"]["name"]: pod for pod in pods(node)}
    assert {name: after[name]["metadata"]["uid"] for name in uids} == uids
    assert not any("deletionTimestamp" in after[name]["metadata"] for name in uids)
    assert {after[name]["status"]["phase"] for name in uids} == {"Running"}


def pods(node: Node) -> list[Thing]:
    return node.objects("pod", "default")


@contextlib.contextmanager
def cordoned(node: Node) -> Iterator[None]:
    """No Pod is scheduled to this node meanwhile."""
    node.kubectl("cordon", node.name)
    try:
        yield
    finally:
        node.kubectl("uncordon", node.name)


def held_first(node: Node, other: Node, made: Thing) -> tuple[str, str, int]:
    """Creates a workload on the first node; returns name and UID of its Pod, and its card."""
    with cordoned(other):
        node.apply(made)
        held = holder(node, made["metadata"]["name"])
    assert node.pod(held[0])["spec"]["nodeName"] == node.name
    return held


def evictions(node: Node, since: int) -> list[tuple[str, str, str, int]]:
    """The requests for evictions, by the API server's audit from this entry on.

    Of each the node whose agent asked, as whom it did, the Pod, and the answer.
    """
    found = [
        (
            each["user"].get("extra", {}).get(NODE_OF_TOKEN, [""])[0],
            each.get("impersonatedUser", {}).get("username", ""),
            each["objectRef"]["name"],
            each["responseStatus"]["code"],
        )
        for each in node.cluster.audit()[since:]
        if each.get("objectRef", {}).get("subresource") == "eviction"
    ]
    print(found)
    return found


@pytest.mark.parametrize(
    "made",
    [of_deployment(), of_stateful_set(), of_job()],
    ids=["device plugin", "extended resource", "claim"],
)
def test_the_pod_of_a_dead_card_runs_again_on_the_other_node(
    node: Node, other: Node, kill: Callable[[int], None], made: Thing
) -> None:
    app = made["metadata"]["name"]
    name, uid, card = held_first(node, other, made)
    since = len(node.cluster.audit())
    kill(card)
    runs_again(node, uid, app)
    again, other_uid, _ = holder(other, app)  # as the other node's agent says, too
    assert other_uid != uid
    assert node.pod(again)["spec"]["nodeName"] == other.name
    # What names a claim is the taint's controller's, and it may be first for the other resource.
    by_agent = app == "serves" or (app == "keeps" and not tainted(node, uid))
    request = (node.name, f"system:node:{node.name}", name, 201)
    assert evictions(node, since) == ([request] if by_agent else [])
    if app == "trains":
        assert not node.get("job", app, "default")["status"].get("failed")


def test_where_all_cards_of_a_node_die_no_pod_is_evicted(
    node: Node, other: Node, kill: Callable[[int], None]
) -> None:
    made = (of_deployment(), of_job())
    held = {each["metadata"]["name"]: held_first(node, other, each) for each in made}
    since = len(node.cluster.audit())
    for card in range(4):
        kill(card)
    node.wait_for(
        "the reason", lambda: any("driver and host" in text for text in waits(node)), 2 * SOON
    )
    time.sleep(AFTER + 1)  # in which they would have been evicted
    # As a driver that comes up brings them back: one after the other.
    node.fault("ok", "npu0", "npu1")
    node.wait_equal("two cards", lambda: node.allocatable(PLUGIN), 2)
    node.fault("ok", "npu2", "npu3")
    node.wait_for("all cards to be well", lambda: well(node))
    assert len([card for card in other.cards() if not card["holders"]]) == 2
    for app, (_, uid, _) in held.items():
        assert [each["metadata"]["uid"] for each in of_app(node, app)] == [uid]
    assert evictions(node, since) == []
