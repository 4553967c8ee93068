"""An API server with DRA's newer features off: whole cards, healthy ones, and each one once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.dra.claims import CONFIG, devices, run, running, seen, verified, waits
from tests.e2e.dra.conftest import OVERLAY, published
from tests.e2e.dra.test_partitions import CUT, configure, wait_offered
from tests.e2e.manifests import claim_pod, request, small, template
from tests.e2e.node import SOON, Node

pytestmark = pytest.mark.since("1.36")
GATES = (
    "DRADeviceTaintRules",
    "DRADeviceTaints",
    "DRAPartitionableDevices",
)


@pytest.fixture(autouse=True)
def gates_off(node: Node) -> Iterator[None]:
    """The API server runs without them until the test has ended; then cards are to be cut."""
    off = ",".join(f"{gate}=false" for gate in GATES)
    node.cluster.stop_api_server()
    node.cluster.start_api_server(f"--feature-gates={off}")
    configure(node, CUT, 8)
    yield
    node.delete_pods()
    node.cluster.stop_api_server()
    node.cluster.start_api_server()
    node.deploy(CONFIG, OVERLAY)  # an edit takes a minute after an outage
    wait_offered(node, 8)


def test_no_card_twice_and_none_that_is_unhealthy(node: Node, kill: Callable[[int], None]) -> None:
    wait_offered(node, 8)
    published(node)
    assert not any("consumesCounters" in one for one in devices(node).values())

    def doctor_says_so() -> bool:
        return "dra.partitions has no effect" in node.in_agent("sh", "-c", "npu-agent doctor; true")

    node.wait_for("the edit, which takes a minute after an outage", doctor_says_so, 4 * SOON)
    run(node, claim_pod("victim"))
    (card,) = verified(node, "victim", 1).cards
    kill(card)
    # Without its taint it would be given away: so it is not in the slice.
    node.wait_for("it to be left out", lambda: card not in devices(node))
    assert len(devices(node)) == 7
    run(node, template("six", request(count=6)), small("six", of_template="six"), claim_pod("last"))
    cards = [verified(node, "last", 1).cards, seen(node, "six").cards, {card}]
    assert set.union(*map(set, cards)) == set(range(8))
    node.apply(claim_pod("late"))
    waits(node, "late")
    verified(node, "victim", 1)
    # It is back once it is well, and still its Pod's.
    node.fault("ok", f"npu{card}")
    published(node)
    waits(node, "late")
    node.delete_pods("victim")
    running(node, "late")
    assert verified(node, "late", 1).cards == {card}
