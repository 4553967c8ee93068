"""A node that moves from the device plugin to DRA and back by restarts of its agent.

Old Pods run, end and start meanwhile.

The Pods ask for `beta.furiosa.ai/npu` and nothing else, and are never edited.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import ClusterError
from tests.e2e.dra.claims import devices, prepared, run, seen
from tests.e2e.dra.conftest import CARDS
from tests.e2e.dra.test_churn import AUDIT
from tests.e2e.manifests import IMAGE, RESOURCE, Thing, container, deployment, npu_pod
from tests.e2e.node import NAMESPACE, SOON, Node

DRA, PLUGIN = "dra", "device-plugin"
LONG = (pytest.mark.long, pytest.mark.timeout(1500))
AUDITS: Thing = {"volumeMounts": [{"name": "audit", "mountPath": "/audit"}]}

pytestmark = [pytest.mark.since("1.36"), pytest.mark.usefixtures("classes")]


@pytest.fixture(autouse=True)
def back(clean: None, node: Node) -> Iterator[None]:  # noqa: ARG001 (it is to end after this)
    """The node offers its cards by DRA again, whatever happened."""
    yield
    node.kubectl("uncordon", node.name)
    node.kubectl("delete", "deployments", "--all", "--namespace", "default")
    node.delete_pods()
    moves(node, "auto")
    try:
        everything_is(node, DRA, 4 * SOON)
    except ClusterError:
        print(node.story(), file=sys.stderr)
        raise


def moves(node: Node, api: str, *, rollout: bool = True) -> None:
    """Edits the key and restarts the agent by a rollout, or by deleting its Pod."""
    node.configure({"allocation": {"api": api}})
    if rollout:
        node.restart()
    else:
        name = node.agent()["metadata"]["name"]
        node.kubectl("delete", "pod", name, "--namespace", NAMESPACE)
        node.wait_for("the next agent", node.agent_ready, 2 * SOON)


def free(node: Node) -> set[int]:
    """The cards in slices that have no taint."""
    return {card for card, device in devices(node).items() if not device.get("taints")}


def everything_is(node: Node, api: str, timeout: float = 2 * SOON, cards: int = CARDS) -> None:
    """Waits until all cards are offered by one API, and none by the other one."""

    def there() -> bool:
        counts = (node.allocatable() or 0, len(devices(node)), len(free(node)))
        assert counts == ((0, cards, cards) if api == DRA else (cards, 0, 0)), counts
        return True

    node.wait_for(f"all cards to be offered by {api}", there, timeout)


@contextmanager
def no_pod_fails(node: Node) -> Iterator[None]:
    """No Pod fails meanwhile."""
    over, failed, looks = threading.Event(), set[str](), 0

    def look() -> None:
        nonlocal looks
        while not over.is_set():
            try:
                there = pods(node)
            except (ClusterError, OSError):
                continue
            looks += 1
            failed.update(
                f"{pod['metadata']['name']}: {pod['status'].get('message')}"
                for pod in there
                if pod["status"]["phase"] == "Failed"
            )

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join(SOON)
    assert looks
    assert not failed


@contextmanager
def cordoned(node: Node) -> Iterator[None]:
    """As the documentation says for this one step: no Pod is sent here by an old count."""
    node.kubectl("cordon", node.name)
    yield
    node.kubectl("uncordon", node.name)


def old_pods(audit: Path, replicas: int, script: str = AUDIT) -> Thing:
    """Old Pods, each with one card, which check that no other Pod has it."""
    command = script.replace("SECONDS", "100000")
    # The agent's image has flock.
    main = container(limits={RESOURCE: 1}, image=IMAGE, command=command, **AUDITS)
    volumes = [{"name": "audit", "hostPath": {"path": str(audit)}}]
    spec = {"terminationGracePeriodSeconds": 1, "volumes": volumes}
    return deployment("old", main, replicas=replicas, **spec)


def pods(node: Node) -> list[Thing]:
    """Those that are not being deleted."""
    found = node.objects("pod", "default")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def by_claims(found: list[Thing]) -> list[bool]:
    """For each Pod that runs, whether it has its cards by a claim."""
    return [
        "extendedResourceClaimStatus" in pod["status"]
        for pod in found
        if pod["status"]["phase"] == "Running"
    ]


def all_run_by(node: Node, api: str, replicas: int) -> None:
    """Waits until so many Pods run, by this API."""
    wanted = [api == DRA] * replicas
    node.wait_equal("the Pods to run", lambda: by_claims(pods(node)), wanted, 2 * SOON)


def churned_until_all_are(node: Node, api: str, replicas: int, chosen: random.Random) -> None:
    """Deletes Pods one after the other until all of them, and all cards, are the other API's."""
    started, deleted = time.monotonic(), 0
    while True:
        assert time.monotonic() - started < 240, (by_claims(pods(node)), devices(node))
        there = pods(node)
        run = [pod for pod in there if pod["status"]["phase"] == "Running"]
        moved = [new == (api == DRA) for new in by_claims(run)]
        if deleted > replicas and moved == [True] * replicas:
            break
        others = [pod for pod, done in zip(run, moved, strict=True) if not done]
        # On the way back a scheduler counts the Pods with claims against the device plugin's
        # cards: the next one may have to wait until a second one has ended.
        if others or len(run) == replicas:
            name = chosen.choice(others or run)["metadata"]["name"]
            node.kubectl("delete", "pod", name, "--wait=false", "--namespace", "default")
            deleted += 1
        time.sleep(0.3)  # between two looks
    everything_is(node, api)
    print(f"moved to {api} in {time.monotonic() - started:.0f} s, while {deleted} Pods ended")


@pytest.mark.parametrize(("replicas", "times"), [(4, 1), pytest.param(6, 4, marks=LONG)])
def test_old_pods_churn_while_their_node_moves_and_comes_back(
    node: Node, replicas: int, times: int
) -> None:
    chosen = random.Random(replicas)
    audit = node.cluster.workdir / f"moves-{replicas}"
    audit.mkdir()
    moves(node, PLUGIN)
    everything_is(node, PLUGIN)
    with no_pod_fails(node):
        node.apply(old_pods(audit, replicas))
        for turn in range(times):
            all_run_by(node, PLUGIN, replicas)
            with cordoned(node):
                moves(node, DRA)
                node.wait_allocatable(0)
            node.wait_equal("the free cards", lambda: len(free(node)), CARDS - replicas)
            if turn % 2 == 0:
                node.kill_agent()  # it goes on where it was
            else:
                node.cluster.stop_kubelet()
                node.cluster.start_kubelet()
            churned_until_all_are(node, DRA, replicas, chosen)
            # It is an empty list that the kubelet has: it remembers no cards.
            node.wait_equal("no capacity", node.capacity, 0)
            moves(node, PLUGIN)
            churned_until_all_are(node, PLUGIN, replicas, chosen)
    assert not (audit / "twice").exists(), (audit / "twice").read_text(encoding="utf-8")
    assert len((audit / "seen").read_text(encoding="utf-8").splitlines()) > 2 * replicas * times
    assert not prepared(node)


def test_a_pod_keeps_its_card_over_both_moves(node: Node) -> None:
    """Here no agent runs for a moment; in a rollout, which the others do, there are two."""
    run(node, npu_pod("claims"))
    by_claim = seen(node, "claims")
    with no_pod_fails(node):
        moves(node, PLUGIN, rollout=False)
        node.wait_allocatable(CARDS - 1)
        assert not devices(node)
        run(node, npu_pod("plugin"))
        by_plugin = seen(node, "plugin")
        moves(node, DRA, rollout=False)
        node.wait_allocatable(0)
        others = set(range(CARDS)) - by_plugin.cards
        node.wait_equal("the others", lambda: free(node), others)
        run(node, npu_pod("next"))
        assert not seen(node, "next").cards & (by_claim.cards | by_plugin.cards)
        assert seen(node, "claims") == by_claim
        assert seen(node, "plugin") == by_plugin
        node.delete_pods("plugin")
        everything_is(node, DRA)
