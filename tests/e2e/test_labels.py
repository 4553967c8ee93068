"""The Node's labels and Events on a real API server, by the agent's own token and rights."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from npu_agent.kubelet import podresources
from npu_agent.vendors.furiosa.labels import SETS
from tests.e2e.manifests import RESOURCE, npu_pod
from tests.e2e.node import AGENT, SOON, Node

LABELS: dict[str, Any] = {"sets": ["alpha", "beta", "current"], "resync": 10}
ALL_SETS = {"labels": LABELS}
pytestmark = pytest.mark.one_kubelet
COUNT = "beta.furiosa.ai/npu.count"
FOREIGN = {"example.com/rack": "a7", "beta.furiosa.ai/not-ours": "theirs", "npu-agent/note": "x"}
CARDS = ("npu0", "npu1")


@pytest.fixture(scope="module", autouse=True)
def all_sets(node: Node) -> Iterator[None]:
    """All sets are wanted, and there are foreign labels too."""
    node.label(FOREIGN)
    node.deploy(ALL_SETS)
    yield
    node.label(dict.fromkeys(FOREIGN))
    node.deploy()


@pytest.fixture(scope="module")
def expected(node: Node) -> dict[str, str]:
    """The labels of two cards, as a command has them: tests/outputs/labels has their values."""
    words = (f"--host-root={node.cluster.host_root}", f"--labels-sets={','.join(LABELS['sets'])}")
    command = (sys.executable, "-m", "npu_agent", "labels", "--output=json", *words)
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    values = {row["label"]: row["value"] for row in rows if row["value"]}
    return {label: value for label, value in values.items() if "furiosa.ai/" in label}


@pytest.fixture(autouse=True)
def labelled(node: Node, expected: dict[str, str]) -> Iterator[None]:
    """Each test begins, and leaves the node, with the labels of two cards."""
    complete(node, expected)
    yield
    node.fault("ok", *CARDS)
    node.configure(ALL_SETS)


def complete(node: Node, expected: dict[str, str]) -> None:
    """Waits until the labels of ours are these."""
    node.wait_equal("the labels", lambda: ours(node), expected, 2 * SOON)


def ours(node: Node) -> dict[str, str]:
    return {
        key: value
        for key, value in node.labels().items()
        if key.startswith(tuple(set_.prefix for set_ in SETS.values())) and key not in FOREIGN
    }


def foreign(node: Node) -> dict[str, str]:
    return {key: value for key, value in node.labels().items() if key in FOREIGN}


def wait_count(node: Node, count: str) -> None:
    """Waits until the label says that there are so many cards."""
    node.wait_equal("the count", lambda: node.labels().get(COUNT), count, 2 * SOON)


def test_labels_follow_the_hardware(node: Node, expected: dict[str, str]) -> None:
    node.fault("gone", "npu1")
    wait_count(node, "1")
    node.fault("back", "npu1")
    wait_count(node, "2")
    # A card that fails is installed all the same.
    node.fault("dead", "npu1")
    node.wait_allocatable(1)
    assert ours(node) == expected
    node.fault("ok", "npu1")
    node.fault("gone", *CARDS)
    complete(node, {})
    assert foreign(node) == FOREIGN
    node.fault("back", *CARDS)
    complete(node, expected)
    # What was changed by hand is put back.
    node.label({COUNT: "7", "furiosa.ai/npu.product": None})
    complete(node, expected)
    assert foreign(node) == FOREIGN


def test_labels_outlive_the_agent(node: Node, expected: dict[str, str]) -> None:
    before, run = versions(node), node.agent_run()
    node.kill_agent()
    node.wait_restarted(run)
    node.restart()
    assert ours(node) == expected
    node.kubectl("delete", *AGENT, "--wait")
    node.wait_for("the agent to be gone", lambda: not node.agent_pods())
    node.deploy(ALL_SETS)
    node.wait_allocatable(2)
    assert ours(node) == expected
    # Nor did they vanish for a moment: they were not written.
    assert versions(node) == before


def versions(node: Node) -> dict[str, str]:
    """When the agent wrote labels of ours last, by field manager."""
    get = ("get", "node", node.name, "-o", "json", "--show-managed-fields")
    return {
        entry["manager"]: entry["time"]
        for entry in json.loads(node.kubectl(*get))["metadata"]["managedFields"]
        if any(set_.prefix in json.dumps(entry["fieldsV1"]) for set_ in SETS.values())
        and entry["manager"] == "npu-agent"
    }


def test_labels_by_commands_in_the_agents_pod(node: Node, expected: dict[str, str]) -> None:
    # labels.output needs a restart; until it ends the old instance would follow edits of the sets.
    node.deploy({"labels": {**LABELS, "output": "none"}})
    node.wait_allocatable(2)
    try:
        assert ours(node) == expected  # a config that wants none takes none away
        assert COUNT in node.in_agent("npu-agent", "labels", "show")
        assert COUNT in node.in_agent("npu-agent", "labels", "clear")
        assert ours(node) == {}
        assert foreign(node) == FOREIGN
        assert "nothing to clear" in node.in_agent("npu-agent", "labels", "clear")
        assert COUNT in node.in_agent("npu-agent", "labels", "apply")
        assert ours(node) == expected  # the sets of the agent's own config
    finally:
        node.deploy(ALL_SETS)
        node.wait_allocatable(2)
    complete(node, expected)


def test_events_are_on_the_node_with_counts(node: Node) -> None:
    node.kubectl("delete", "events", "-n", "default", "--all")
    for _ in range(2):
        node.fault("dead", "npu1")
        node.wait_allocatable(1)
        node.fault("ok", "npu1")
        node.wait_allocatable(2)
    node.configure("defaultPe: Sinlge\n")

    def counts() -> dict[str, int]:
        found = node.objects("event", "default")
        ours = [one for one in found if one["source"].get("component") == "npu-agent"]
        return {event["reason"]: event["count"] for event in ours}

    wanted = {"NPUUnhealthy": 2, "NPURecovered": 2, "ConfigRejected": 1}
    node.wait_equal("all Events", counts, wanted, 2 * SOON)
    described = node.kubectl("describe", "node", node.name)
    assert "became unhealthy: the driver reports the card dead (alive says 0)" in described
    assert "Sinlge" in described
    assert "(x2 over" in described


def test_the_api_server_is_away_while_the_hardware_changes(node: Node) -> None:
    cluster = node.cluster
    static = cluster.static_pods / "static.json"
    cluster.stop_api_server()
    try:
        stopped = time.monotonic()
        node.fault("gone", "npu1")
        # The kubelet runs a static Pod without any API server: it is given the card that is left.
        static.write_text(
            json.dumps(npu_pod("static", 1, restartPolicy="Always")), encoding="utf-8"
        )
        wait_held(node, [f"static-{node.name}"])
        time.sleep(max(0.0, 30 - (time.monotonic() - stopped)))  # the length of the outage
    finally:
        cluster.start_api_server()
    wait_count(node, "1")
    wait_held(node, [f"static-{node.name}"])
    static.unlink()
    wait_held(node, [])
    node.fault("back", "npu1")
    wait_count(node, "2")
    assert node.log().count("cannot apply the labels; retrying") < 10


def wait_held(node: Node, pods: list[str]) -> None:
    """Waits until these hold a card each, as the kubelet itself says, past agent and API server."""
    socket = node.cluster.kubelet_dir / "pod-resources" / "kubelet.sock"

    def held() -> list[str]:
        found = asyncio.run(podresources.fetch(socket))
        return [one.pod for one in found if one.resource == RESOURCE]

    node.wait_equal("what the kubelet says is held", held, pods, 2 * SOON)
