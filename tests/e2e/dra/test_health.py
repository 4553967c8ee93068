"""A card dies under its Pod: what the scheduler, the kubelet and the Pod's owner see of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from npu_agent.config.schema import HealthConfig
from tests.e2e.dra.claims import (
    CONFIG,
    DRIVER,
    pod,
    request,
    run,
    running,
    said,
    seen,
    small,
    taints,
    template,
    verified,
    waits,
)
from tests.e2e.node import SOON, Node

DEFAULT = HealthConfig()
NOTICED = DEFAULT.failures * DEFAULT.interval + 1.5
UNHEALTHY = f"{DRIVER}/unhealthy"


@pytest.fixture
def evicting(node: Node) -> Iterator[Callable[[], None]]:
    """Edits the config so that Pods are evicted, until the test has ended."""
    yield lambda: node.configure(yaml.safe_dump({**CONFIG, "health": {"evict": True}}))
    node.configure(yaml.safe_dump(CONFIG))


def health(node: Node, name: str) -> dict[str, Any]:
    """What the Pod's status says of its one device."""
    (status,) = node.pod(name)["status"]["containerStatuses"]
    (resource,) = status["allocatedResourcesStatus"]
    assert resource["name"] == "claim:npus"
    (device,) = resource["resources"]
    return dict(device)


def is_healthy(node: Node, name: str) -> bool:
    found = health(node, name)
    assert found["health"] == "Healthy", found
    return True


def is_unhealthy(node: Node, name: str) -> bool:
    found = health(node, name)
    assert found["health"] == "Unhealthy", found
    assert "says 0" in found["message"], found
    return True


def seconds(node: Node, what: str, condition: Callable[[], bool], since: float) -> float:
    """When a condition came true."""
    node.cluster.wait_for(what, condition, SOON)
    return time.monotonic() - since


def test_a_card_dies_under_its_pod_and_recovers(node: Node, kill: Callable[[int], None]) -> None:
    run(node, pod("victim"))
    (card,) = verified(node, "victim", 1).cards
    node.cluster.wait_for("its health", lambda: is_healthy(node, "victim"), SOON)

    kill(card)
    dead = time.monotonic()
    tainted = seconds(node, "a taint", lambda: taints(node, card) != {}, dead)
    told = seconds(node, "the Pod's status", lambda: is_unhealthy(node, "victim"), dead)
    print(f"a dead card: taint after {tainted:.2f} s, the Pod's status after {told:.2f} s")
    assert taints(node, card) == {UNHEALTHY: "NoSchedule"}
    assert max(tainted, told) < NOTICED
    # The scheduler gives it to nobody, and the Pod keeps it.
    made = template("seven", request(count=7))
    run(node, made, small("others", of_template="seven"))
    assert card not in seen(node, "others").cards
    assert node.restarts()["victim"] == 0

    node.fault(f"npu{card}", "ok")
    node.cluster.wait_for("no taint", lambda: taints(node, card) == {}, SOON)
    node.cluster.wait_for("the Pod's status", lambda: is_healthy(node, "victim"), SOON)
    assert node.restarts()["victim"] == 0


def test_a_pod_waits_for_a_card_that_recovers(node: Node, kill: Callable[[int], None]) -> None:
    run(node, template("seven", request(count=7)), small("others", of_template="seven"))
    (left,) = set(range(8)) - seen(node, "others").cards
    kill(left)
    node.cluster.wait_for("a taint", lambda: taints(node, left) != {}, SOON)
    node.cluster.apply(pod("next"))
    waits(node, "next")
    node.fault(f"npu{left}", "ok")
    running(node, "next")
    assert verified(node, "next", 1).cards == {left}


def test_a_pod_is_evicted_if_the_config_says_so(
    node: Node, kill: Callable[[int], None], evicting: Callable[[], None]
) -> None:
    run(node, pod("victim"), pod("bystander"))
    (card,) = verified(node, "victim", 1).cards
    uid = node.pod("victim")["metadata"]["uid"]
    kill(card)
    node.cluster.wait_for("a taint", lambda: taints(node, card) != {}, SOON)
    assert taints(node, card) == {UNHEALTHY: "NoSchedule"}

    evicting()

    def evicted() -> bool:
        names = {one["metadata"]["uid"] for one in node.cluster.objects("pod", "default")}
        return uid not in names

    node.cluster.wait_for("the Pod to be evicted", evicted, SOON)
    assert taints(node, card) == {UNHEALTHY: "NoExecute"}
    said(node, "victim", "Marking for deletion")
    verified(node, "bystander", 1)
