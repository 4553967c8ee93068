"""API servers that answer otherwise than most: 429 to all, and no watch cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.api import ACCOUNT, turned_away
from tests.e2e.node import NAMESPACE, SOON, Node

pytestmark = pytest.mark.one_kubelet
COUNT = "beta.furiosa.ai/npu.count"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"


@pytest.fixture
def uncached(node: Node) -> Iterator[None]:
    """The API server has no watch cache, and so sends no bookmarks."""
    node.cluster.stop_api_server()
    node.cluster.start_api_server("--watch-cache=false")
    yield
    node.cluster.stop_api_server()
    node.cluster.start_api_server()
    node.wait_edits_arrive()
    node.configure("{}")
    node.wait_allocatable(2)


def put_back(node: Node, timeout: float = SOON) -> None:
    """A label of the agent that another client removes comes back."""
    node.label({COUNT: None})
    node.wait_equal("the label", lambda: node.labels().get(COUNT), "2", timeout)


def test_too_many_requests_are_waited_out(node: Node, token: str) -> None:
    put_back(node)
    account = {"namespace": NAMESPACE, "name": ACCOUNT}
    subject = {"kind": "ServiceAccount", "serviceAccount": account}
    before = len(node.cluster.audit())

    def refused() -> int:
        asked = [one for one in node.cluster.audit()[before:] if one["user"]["username"] == USER]
        codes = [one["responseStatus"]["code"] for one in asked if one["verb"] != "create"]
        return codes.count(429)

    with turned_away(node, subject, {"Authorization": f"Bearer {token}"}):
        node.label({COUNT: None})
        node.wait_for("three attempts", lambda: refused() >= 3)
        assert COUNT not in node.labels()
    node.wait_equal("the label", lambda: node.labels().get(COUNT), "2", 4 * SOON)
    assert "429" in node.log()


@pytest.mark.usefixtures("uncached")
def test_without_a_watch_cache_changes_are_seen(node: Node) -> None:
    put_back(node, 4 * SOON)  # by a list, perhaps
    for _ in range(2):
        put_back(node)  # by the watch
