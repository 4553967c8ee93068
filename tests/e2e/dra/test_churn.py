"""Many Pods through eight cards, ending in every way: no core is twice, seen from inside."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.cluster import ClusterError
from tests.e2e.manifests import ONE, Thing, claim_pod, request, template
from tests.e2e.node import Node

AUDIT = """\
set -e
fd=3
cards=$(ls /dev /dev/rngd 2>/dev/null | sed -n 's/^npu\\([0-9][0-9]*\\).*/\\1/p' | sort -u)
for card in $cards; do
  eval "exec $fd>/audit/lock-$card"
  flock -n $fd || echo "$HOSTNAME $card" >>/audit/twice
  fd=$((fd + 1))
done
echo "$HOSTNAME" $cards >>/audit/seen
exec sleep SECONDS
"""
"""A lock is there for as long as the process is, however that ends, and in one kernel."""
TOGETHER = 16
"""Pods at the same time: twice as many as there are cards."""
LONG = (pytest.mark.long, pytest.mark.timeout(900))
ENDS = ("by itself", "by itself", "deleted", "by force")


@pytest.mark.parametrize("count", [32, pytest.param(200, marks=LONG)])
def test_no_card_is_twice(node: Node, count: int) -> None:
    chosen = random.Random(count)
    audit = node.cluster.workdir / f"audit-{count}"
    audit.mkdir()
    node.apply(template("two", request(count=2)))
    todo = [f"pod-{at}" for at in range(count)]
    ends = {name: chosen.choice(ENDS) for name in todo}
    wide = {name for name in todo if chosen.random() < 0.2}
    started = time.monotonic()
    done: list[str] = []
    kills = [count * part // 4 for part in (3, 2, 1)] if count > 100 else [count // 2]
    while todo or live(node):
        assert time.monotonic() - started < 240 + count, live(node)
        pods, written = live(node), audited(audit)
        for found in pods:
            name, phase = found["metadata"]["name"], found["status"]["phase"]
            assert phase != "Failed" or ends[name] == "deleted", found["status"]
            over = phase == "Succeeded" or (name in written and ends[name] != "by itself")
            if over and "deletionTimestamp" not in found["metadata"]:
                force = ("--force",) if ends[name] == "by force" else ()
                node.kubectl("delete", "pod", name, "--wait=false", *force)
                done.append(name)
        if kills and len(done) >= kills[-1] and all_ready(node):
            kills.pop()
            node.kill_agent()
        room = TOGETHER - len(pods)
        new, todo = todo[:room], todo[room:]
        if new:
            node.apply([churned(name, audit, ends[name], name in wide) for name in new])
        time.sleep(0.2)  # between two looks
    seen = audited(audit)
    took = time.monotonic() - started
    print(f"{count} Pods in {took:.0f} s, {sum(map(len, seen.values()))} cards handed out")
    assert {name: len(cards) for name, cards in seen.items()} == {
        name: 2 if name in wide else 1 for name in ends
    }
    assert {card for cards in seen.values() for card in cards} == set(map(str, range(8)))
    assert not (audit / "twice").exists(), (audit / "twice").read_text(encoding="utf-8")


def audited(audit: Path) -> dict[str, list[str]]:
    """The cards that each Pod has seen; a Pod that is Running may not have looked yet."""
    lines = (
        (audit / "seen").read_text(encoding="utf-8").splitlines()
        if (audit / "seen").exists()
        else []
    )
    return {name: cards for name, *cards in map(str.split, lines)}


def live(node: Node) -> list[Thing]:
    """All Pods, with those that are being deleted."""
    try:
        return node.objects("pod", "default")
    except ClusterError:
        return []


def all_ready(node: Node) -> bool:
    """Whether there is one agent, and it is ready."""
    return len(node.agent_pods()) == 1 and node.agent_ready()


def churned(name: str, audit: Path, end: str, wide: bool) -> Thing:
    made = claim_pod(
        name,
        of_template="two" if wide else ONE,
        command=AUDIT.replace("SECONDS", "1" if end == "by itself" else "1000"),
        # PID 1 of a container takes no TERM: whoever deletes it waits for that long.
        terminationGracePeriodSeconds=1,
        volumes=[{"name": "audit", "hostPath": {"path": str(audit)}}],
    )
    made["spec"]["containers"][0]["volumeMounts"] = [{"name": "audit", "mountPath": "/audit"}]
    return made
