"""The Node's labels and Events on a real API server, by the agent's own token and rights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from npu_agent.core.ledger import Assignment
from npu_agent.kubelet import podresources as assignments
from npu_agent.vendors.furiosa.labels import SETS
from tests.e2e.node import NAMESPACE, PROJECT, RESOURCE, SOON, WORKLOAD, Node

ALL_SETS: dict[str, Any] = {"labels": {"sets": ["alpha", "beta", "current"], "resync": 10}}
pytestmark = pytest.mark.one_kubelet
COUNT = "beta.furiosa.ai/npu.count"
FOREIGN = {"example.com/rack": "a7", "beta.furiosa.ai/not-ours": "theirs", "npu-agent/note": "x"}


@pytest.fixture(scope="module", autouse=True)
def all_sets(node: Node) -> Iterator[None]:
    """All sets are wanted, and there are foreign labels beside them."""
    node.label(FOREIGN)
    node.deploy(ALL_SETS)
    yield
    node.label(dict.fromkeys(FOREIGN))
    node.deploy({"defaultPe": "Fusion"})


@pytest.fixture(autouse=True)
def labelled(node: Node) -> Iterator[None]:
    """Each test begins, and leaves the node, with the labels of two cards."""
    complete(node)
    yield
    for card in ("npu0", "npu1"):
        node.fault(card, "ok")
    node.configure(yaml.safe_dump(ALL_SETS))


@contextlib.contextmanager
def no_labels_wanted(node: Node) -> Iterator[None]:
    """An agent that leaves labels alone, as labels.output needs a restart.

    The sets stay as they are: the old instance would follow them until it ends.
    """
    node.deploy({"labels": {**ALL_SETS["labels"], "output": "none"}})
    node.wait_allocatable(2)
    node.cluster.wait_for("the old instance to be gone", lambda: alone(node), SOON)
    try:
        yield
    finally:
        node.deploy(ALL_SETS)
        node.wait_allocatable(2)


EXPECTED = {
    "alpha.furiosa.ai/npu.family": "warboy",
    "alpha.furiosa.ai/npu.hwtype": "haps",
    "beta.furiosa.ai/driver.reference": "3def9c2",
    "beta.furiosa.ai/driver.version": "1.9.2",
    "beta.furiosa.ai/driver.version.major": "1",
    "beta.furiosa.ai/driver.version.minor": "9",
    "beta.furiosa.ai/driver.version.patch": "2",
    "beta.furiosa.ai/machine.name": "Simulated-Host",
    "beta.furiosa.ai/machine.vendor": "npu-agent",
    "beta.furiosa.ai/npu.count": "2",
    "beta.furiosa.ai/npu.family": "warboy",
    "beta.furiosa.ai/npu.product": "warboyB0",
    "furiosa.ai/driver.version": "1.9.2",
    "furiosa.ai/driver.version.major": "1",
    "furiosa.ai/driver.version.metadata": "3def9c2",
    "furiosa.ai/driver.version.minor": "9",
    "furiosa.ai/driver.version.patch": "2",
    "furiosa.ai/firmware.version": "1.6.0",
    "furiosa.ai/firmware.version.major": "1",
    "furiosa.ai/firmware.version.metadata": "c1bebfd",
    "furiosa.ai/firmware.version.minor": "6",
    "furiosa.ai/firmware.version.patch": "0",
    "furiosa.ai/npu.count": "2",
    "furiosa.ai/npu.family": "warboy",
    "furiosa.ai/npu.product": "warboyB0",
}


def alone(node: Node) -> bool:
    """Whether there is one agent Pod, none that is ending among them."""
    selector = "app.kubernetes.io/name=npu-agent"
    return len(node.cluster.objects("pod", NAMESPACE, labelSelector=selector)) == 1


def complete(node: Node, expected: dict[str, str] | None = None) -> None:
    """Waits until the labels of ours are these, by default the expected ones of all sets."""

    def so() -> bool:
        seen, wanted = ours(node).items(), (EXPECTED if expected is None else expected).items()
        assert seen == wanted, {"not wanted": seen - wanted, "missing": wanted - seen}
        return True

    node.cluster.wait_for("the labels", so, 2 * SOON)


def labels(node: Node) -> dict[str, str]:
    found: dict[str, str] = node.cluster.get("node", node.name)["metadata"]["labels"]
    return found


def ours(node: Node) -> dict[str, str]:
    return {
        key: value
        for key, value in labels(node).items()
        if key.startswith(tuple(set_.prefix for set_ in SETS.values())) and key not in FOREIGN
    }


def foreign(node: Node) -> dict[str, str]:
    return {key: value for key, value in labels(node).items() if key in FOREIGN}


def until(node: Node, what: str, **expected: str | None) -> None:
    """Waits until the labels of these names, in the beta set, have these values."""

    def so() -> bool:
        found = labels(node)
        seen = {name: found.get(f"beta.furiosa.ai/{name}") for name in expected}
        assert seen == expected, seen
        return True

    node.cluster.wait_for(what, so, 2 * SOON)


def test_labels_follow_the_hardware(node: Node) -> None:
    node.fault("npu1", "gone")
    until(node, "one card less", **{"npu.count": "1", "npu.family": "warboy"})
    node.fault("npu1", "back")
    until(node, "the card back", **{"npu.count": "2"})
    # A card that is sick is installed all the same.
    node.fault("npu1", "dead")
    node.wait_allocatable(1)
    assert ours(node) == EXPECTED
    node.fault("npu1", "ok")
    for card in ("npu0", "npu1"):
        node.fault(card, "gone")
    complete(node, {})
    assert foreign(node) == FOREIGN
    for card in ("npu0", "npu1"):
        node.fault(card, "back")
    complete(node)


def test_labels_follow_the_config(node: Node) -> None:
    node.configure(yaml.safe_dump({"labels": {"sets": ["current"], "resync": 10}}))
    wanted = {key: value for key, value in EXPECTED.items() if key.startswith("furiosa.ai/")}
    complete(node, wanted)


def test_a_change_by_hand_is_put_back_and_foreign_labels_are_left_alone(node: Node) -> None:
    node.label({COUNT: "7", "furiosa.ai/npu.product": None})
    complete(node)
    assert foreign(node) == FOREIGN


def test_labels_outlive_the_agent(node: Node) -> None:
    before = versions(node)
    (pod,) = node.agent_pods()
    node.kill_agent()
    node.cluster.wait_for("the agent to be back", lambda: restarted(node, pod), 2 * SOON)
    node.wait_allocatable(2)
    node.restart()
    assert ours(node) == EXPECTED
    # Nor did they vanish for a moment: nobody wrote them.
    assert versions(node) == before
    node.cluster.kubectl("delete", "daemonset", "npu-agent", "-n", NAMESPACE, "--wait")
    node.cluster.wait_for("the agent to be gone", lambda: not node.agent_pods(), SOON)
    assert ours(node) == EXPECTED
    node.deploy(ALL_SETS)
    node.wait_allocatable(2)
    assert ours(node) == EXPECTED
    assert versions(node) == before


def restarted(node: Node, before: dict[str, Any]) -> bool:
    (now,) = node.agent_pods()
    count = [pod["status"]["containerStatuses"][0]["restartCount"] for pod in (before, now)]
    return bool(count[1] == count[0] + 1)


def versions(node: Node) -> dict[str, str]:
    """When each field manager wrote labels of ours last."""
    found = json.loads(
        node.cluster.kubectl("get", "node", node.name, "-o", "json", "--show-managed-fields")
    )
    return {
        entry["manager"]: entry["time"]
        for entry in found["metadata"]["managedFields"]
        if any(set_.prefix in json.dumps(entry["fieldsV1"]) for set_ in SETS.values())
        and entry["manager"] == "npu-agent"
    }


def test_show_and_clear(node: Node) -> None:
    shown = node.in_agent("npu-agent", "labels", "show", "--host-root", "/host")
    assert COUNT in shown
    with no_labels_wanted(node):
        assert ours(node) == EXPECTED  # a config that wants none takes none away
        said = node.in_agent("npu-agent", "labels", "clear")
        assert COUNT in said
        assert ours(node) == {}
        assert foreign(node) == FOREIGN
        assert "nothing to clear" in node.in_agent("npu-agent", "labels", "clear")
        said = node.in_agent("npu-agent", "labels", "apply", "--host-root", "/host")
        assert COUNT in said
        assert set(ours(node)) == {key for key in EXPECTED if key.startswith("beta.")}
    complete(node)


def test_nothing_is_written_while_nothing_changes(node: Node) -> None:
    node.configure(yaml.safe_dump({"labels": {"sets": ["beta"], "resync": 10}}))
    wanted = {key: value for key, value in EXPECTED.items() if key.startswith("beta.")}
    complete(node, wanted)
    begin = len(node.cluster.audit())
    time.sleep(60)  # the quiet minute, with about six looks for drift in it
    mine = [
        (entry["verb"], entry.get("objectRef", {}).get("resource"))
        for entry in node.cluster.audit()[begin:]
        if entry["user"]["username"] == f"system:serviceaccount:{NAMESPACE}:npu-agent"
    ]
    assert set(mine) == {("get", "nodes")}, mine
    assert 4 <= len(mine) <= 9, mine


def events(node: Node) -> list[dict[str, Any]]:
    found = node.cluster.objects("event", "default")
    return [e for e in found if e["source"].get("component") == "npu-agent"]


def test_events_are_on_the_node_with_counts(node: Node) -> None:
    node.cluster.kubectl("delete", "events", "-n", "default", "--all")
    for _ in range(2):
        node.fault("npu1", "dead")
        node.wait_allocatable(1)
        node.fault("npu1", "ok")
        node.wait_allocatable(2)
    node.fault("npu0", "gone")
    node.wait_allocatable(1)
    node.fault("npu0", "back")
    node.wait_allocatable(2)
    node.configure("defaultPe: Sinlge\n")

    def all_there() -> bool:
        seen = {event["reason"]: event["count"] for event in events(node)}
        assert seen == {
            "NPUUnhealthy": 2,
            "NPURecovered": 2,
            "NPURemoved": 1,
            "NPUAdded": 1,
            "ConfigRejected": 1,
        }, seen
        return True

    node.cluster.wait_for("all Events", all_there, 2 * SOON)
    described = node.cluster.kubectl("describe", "node", node.name)
    assert "is unhealthy: alive says 0" in described
    assert 'defaultPe: must be "Fusion" or "Single"' in described or "Sinlge" in described
    assert "(x2 over" in described


def test_without_rights_the_devices_are_served_and_the_log_says_what_to_do(node: Node) -> None:
    binding = "npu-agent"
    saved = node.cluster.kubectl("get", "clusterrolebinding", binding, "-o", "json")
    node.cluster.kubectl("delete", "clusterrolebinding", binding)
    try:
        node.restart()
        node.wait_allocatable(2)

        def said() -> bool:
            (pod,) = node.agent_pods()
            log = node.cluster.logs(pod["metadata"]["name"], NAMESPACE)
            assert "labels not in place" in log, log
            assert "may not get nodes" in log or "forbidden" in log.lower(), log
            return True

        node.cluster.wait_for("the log to say so", said, SOON)
        node.run("served", 1)
    finally:
        again = json.loads(saved)
        again["metadata"] = {"name": binding, "labels": again["metadata"].get("labels", {})}
        node.cluster.apply(again)
    node.label({COUNT: "9"})
    complete(node)


def test_from_outside_a_pod_by_kubeconfig(node: Node) -> None:
    with no_labels_wanted(node):
        for action in ("clear", "apply"):
            subprocess.run(
                node.cluster.command(
                    "env",
                    f"KUBECONFIG={node.cluster.kubeconfig}",
                    f"NODE_NAME={node.name}",
                    *(sys.executable, "-m", "npu_agent", "labels", action),
                    *("--host-root", str(node.cluster.host_root), "--labels-sets", "alpha"),
                ),
                check=True,
                cwd=PROJECT,
            )
        assert ours(node) == {k: v for k, v in EXPECTED.items() if k.startswith("alpha.")}
    complete(node)


def test_the_api_server_is_away_while_the_hardware_changes(node: Node) -> None:
    cluster = node.cluster
    manifests = cluster.static_pods
    cluster.stop_api_server()
    try:
        stopped = time.monotonic()
        node.fault("npu1", "gone")
        # The kubelet runs a static Pod without any API server: it is given the card that is left.
        (manifests / "static.json").write_text(json.dumps(static_pod()))
        held = wait_held(node, lambda found: len(found) == 1)
        assert [one.pod for one in held] == [f"static-{node.name}"]
        time.sleep(max(0.0, 30 - (time.monotonic() - stopped)))  # the length of the outage
    finally:
        cluster.start_api_server()
    until(node, "the label after the outage", **{"npu.count": "1"})
    assert wait_held(node, lambda found: len(found) == 1) == held
    (manifests / "static.json").unlink()
    wait_held(node, lambda found: not found)
    node.fault("npu1", "back")
    until(node, "the card back", **{"npu.count": "2"})
    (pod,) = node.agent_pods()
    log = cluster.logs(pod["metadata"]["name"], NAMESPACE)
    assert log.count("labels not in place: trying again") < 10
    node.wait_edits_arrive()


def static_pod() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "static", "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "main",
                    "image": WORKLOAD,
                    "imagePullPolicy": "Never",
                    "command": ["sleep", "100000"],
                    "resources": {"limits": {RESOURCE: "1"}, "requests": {RESOURCE: "1"}},
                }
            ],
        },
    }


def wait_held(node: Node, condition: Any) -> tuple[Assignment, ...]:
    """Asks the kubelet itself, past agent and API server."""
    socket = node.cluster.kubelet_dir / "pod-resources" / "kubelet.sock"
    found: list[tuple[Assignment, ...]] = []

    def so() -> bool:
        held = tuple(a for a in asyncio.run(assignments.fetch(socket)) if a.resource == RESOURCE)
        assert condition(held), held
        found.append(held)
        return True

    node.cluster.wait_for("what the kubelet says is held", so, 2 * SOON)
    return found[-1]
