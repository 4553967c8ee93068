"""One card is taken out of service by the device plugin, drained and brought back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.e2e.manifests import RESOURCE, container, deployment, thing
from tests.e2e.node import Node
from tests.e2e.test_kubectl import npu

pytestmark = pytest.mark.one_kubelet
KEY = "npu-agent/cordoned"
FOLLOWED = 2.0
"""Seconds from the annotation to the kubelet."""


@pytest.fixture(autouse=True)
def uncordoned(node: Node, request: pytest.FixtureRequest) -> Iterator[None]:
    request.getfixturevalue("repaired")  # which sees to the rest after this
    yield
    annotate(node, None)


def annotate(node: Node, value: str | None) -> None:
    node.kubectl(
        "annotate", "node", node.name, "--overwrite", f"{KEY}={value}" if value else f"{KEY}-"
    )


def npu_agent(node: Node, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as a person with an administrator's kubeconfig."""
    return node.cluster.enter(
        sys.executable, "-m", "npu_agent", *words, "--node", node.name, check=False
    )


def card_of(node: Node, pod: str) -> str:
    """The name of the card that a Pod holds."""
    node.wait_known(pod)
    (card,) = [
        card["name"] for card in node.cards() if any(one["pod"] == pod for one in card["holders"])
    ]
    return str(card)


def test_a_cordoned_card_is_not_given_away_and_its_pod_stays(node: Node) -> None:
    node.run("kept", 1)
    card = card_of(node, "kept")
    annotate(node, json.dumps({card: "swap fan"}))
    began = time.monotonic()
    node.wait_allocatable(1)
    took = time.monotonic() - began
    print(f"from the annotation to the Node's allocatable: {took:.2f} s")
    assert took < FOLLOWED + 1.0  # the kubelet has it before the Node does
    node.create("both", 2)
    node.wait_unschedulable("both")
    node.delete_pods("both")
    node.restart()  # of the agent
    node.wait_allocatable(1)
    assert node.restarts() == {"kept": 0}
    node.delete_pods("kept")
    node.run("next", 1)
    assert card_of(node, "next") != card
    described = node.kubectl("describe", "node", node.name)
    assert f"{card} (" in described
    assert "swap fan" in described
    assert "NPUCordoned" in described
    assert "swap fan" in node.in_agent("npu-agent", "info", "-o", "wide")
    printed = node.in_agent("npu-agent", "uncordon", card)
    assert printed.strip() == f"{card} of Node {node.name} is uncordoned"
    node.wait_allocatable(2)
    assert KEY not in node.get("node", node.name)["metadata"]["annotations"]


def test_a_drain_waits_for_the_budget_and_touches_no_other_card(node: Node) -> None:
    node.run("bystander", 1)
    budget = thing("PodDisruptionBudget", "held", "policy/v1")
    budget["spec"] = {"minAvailable": 1, "selector": {"matchLabels": {"app": "held"}}}
    node.apply([budget, deployment("held", container(limits={RESOURCE: 1}))])
    try:
        (name,) = node.wait_for("the other Pod", lambda: held(node))
        node.wait_phase(name, "Running")
        card = card_of(node, name)
        words = npu_agent(node, "drain", card, "--dry-run").stdout
        assert words.strip() == f"would evict default/{name}"
        done = npu_agent(node, "drain", card, "--reason", "swap fan", "--timeout", "3")
        assert done.returncode == 1, done
        assert f"default/{name} is kept by its PodDisruptionBudget" in done.stderr
        assert held(node) == [name]
        node.kubectl("delete", "pdb", "held", "-n", "default")
        began = time.monotonic()
        done = npu(node, "drain", node.name, card, "--reason", "swap fan", "--timeout", "60")
        print(f"drained in {time.monotonic() - began:.1f} s")
        assert f"evicted default/{name}" in done.stdout
        assert f"{card} is free and can be reset" in done.stdout
        (again,) = node.wait_for(
            "the next Pod", lambda: [each for each in held(node) if each != name]
        )
        node.wait_unschedulable(again)
        (untouched,) = node.pod("bystander")["status"]["containerStatuses"]
        assert untouched["restartCount"] == 0
        npu(node, "uncordon", node.name, card)
        node.wait_phase(again, "Running")
    finally:
        node.kubectl("delete", "deployment", "held", "-n", "default")


def held(node: Node) -> list[str]:
    pods = node.objects("pod", "default", labelSelector="app=held")
    return [one["metadata"]["name"] for one in pods if "deletionTimestamp" not in one["metadata"]]
