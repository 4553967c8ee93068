"""Five alerts, each from the pager to the fix, by a person who has the runbook and kubectl alone.

The fault is made on a simulated card, a real Prometheus scrapes the agent's Pod and evaluates our
rules, the commands are those of docs/alerts.md. Two things differ from a night: a `for` is not
waited for, and errors count for seconds in place of minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.node import Node
from tests.e2e.test_metrics import Prometheus, scraping
from tests.e2e.test_runbook import ALL, REMOVAL, script, shell_on_the_node, type_there, typed
from tests.monitoring.helpers import RUNBOOK, groups

pytestmark = pytest.mark.one_kubelet
MINUTES = {"[15m]": "[30s]", "[20m]": "[40s]"}
"""In the rule of errors, which would be silent only after the first of these."""
CORDONED = "npu-agent/cordoned"
"""The Node's annotation."""


def rule_of_trials(rule: dict[str, Any]) -> dict[str, Any]:
    """The rule without its `for`, which tests/monitoring tests."""
    kept = {key: value for key, value in rule.items() if key != "for"}
    if rule.get("alert") == "NpuErrorsRising":
        for minutes, seconds in MINUTES.items():
            kept["expr"] = kept["expr"].replace(minutes, seconds)
    return kept


@pytest.fixture(scope="module")
def prometheus(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    tried = [
        {**group, "rules": [rule_of_trials(rule) for rule in group["rules"]]}
        for group in groups("2s")
    ]
    path = directory / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": tried}), encoding="utf-8")
    with scraping(node, directory, {}, rule_files=[str(path)]) as made:
        yield made


@dataclass(frozen=True)
class Person:
    """Who is called, and has the alert, the page and a desk with kubectl."""

    node: Node
    prometheus: Prometheus
    directory: Path

    def called(self, alert: str, card: str) -> str:
        """Waits until the alert fires for the card; its description."""
        (fired,) = self.node.wait_for(alert, lambda: self.prometheus.alerts(alert))
        labels = fired["labels"]
        assert (labels["hostname"], labels["device"]) == (self.node.name, card)
        assert fired["annotations"]["runbook_url"].endswith(f"#{alert.lower()}")
        return str(fired["annotations"]["description"])

    def silent(self, alert: str) -> None:
        """Waits until the alert fires no more."""
        self.node.wait_equal(alert, lambda: self.prometheus.alerts(alert), [], 90)

    def type(self, words: str, card: str = "npu0") -> str:
        """Types the page's command with these words at the desk; returns what it prints."""
        return typed(self.node, _command(words, card), self.directory)

    def type_there(self, *words: str) -> None:
        """Types the page's commands with these words on the node."""
        with shell_on_the_node(self.node, self.directory) as shell:
            for each in words:
                type_there(shell, _command(each))
        self.type(REMOVAL)  # what the shell leaves would block a drain

    def row(self, card: str) -> str:
        """What the page's *info* says of the card."""
        (row,) = [line for line in self.type("npu-agent info").splitlines() if f"{card} " in line]
        return row

    def delete(self, description: str) -> None:
        """Deletes the Pods that a description names; a card that is gone had some an hour ago."""
        held = re.search(r"held by((?:,? \S+/\S+?)+)\.", description)
        assert held, description
        living = {
            f"default/{pod['metadata']['name']}" for pod in self.node.objects("pod", "default")
        }
        named = living.intersection(held[1].replace(",", " ").split())
        assert named, description
        for pod in named:
            namespace, name = pod.split("/")
            command = f"kubectl -n {namespace} delete pod {name}"
            self.node.cluster.enter("bash", "-c", script(self.node, command, self.directory))


def _command(words: str, card: str = "npu0") -> str:
    command = next(command for command in ALL if words in command)
    return re.sub(r"\bnpu0\b", card, command)


def says(alert: str, *steps: str) -> None:
    """The section of the alert has these steps, in this order, which a trial takes."""
    section = re.search(rf"^## {alert}\n(.+?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert section
    text = " ".join(section[1].split())
    places = [text.find(step) for step in steps]
    assert -1 not in places, (steps, text)
    assert places == sorted(places), (steps, text)


@pytest.fixture
def person(
    node: Node,
    prometheus: Prometheus,
    repaired: None,  # noqa: ARG001
    tmp_path: Path,
) -> Iterator[Person]:
    prometheus.wait("furiosa_npu_alive == 1", 2)
    yield Person(node, prometheus, tmp_path)
    node.kubectl("uncordon", node.name)
    node.kubectl("annotate", "node", node.name, f"{CORDONED}-")


@pytest.fixture
def card(node: Node, person: Person) -> str:  # noqa: ARG001
    """The card that a Pod, worker, holds."""
    node.run("worker", 1)
    node.wait_known("worker")
    return node.environment("worker", "NPU_DEVNAME")[:4]


def test_an_unhealthy_card(node: Node, person: Person, card: str) -> None:
    says(
        "NpuCardUnhealthy",
        "Delete a Pod that hangs",
        "If the card does not recover, cordon it, which ends the alert",
        "*info* has its serial number",
        "check `dmesg` on the node",
    )
    node.fault("dead", card)
    description = person.called("NpuCardUnhealthy", card)
    assert "held by default/worker" in description
    assert "the driver reports the card dead. Fix: check dmesg on the node" in description
    person.type_there("dmesg")
    person.delete(description)
    node.run("again", 1)
    assert node.environment("again", "NPU_DEVNAME")[:4] != card, "on another card"

    person.type(" cordon ", card)
    person.silent("NpuCardUnhealthy")
    assert "unhealthy" in person.row(card)
    node.fault("ok", card)  # replaced, or reset
    person.type(" uncordon ", card)
    node.wait_allocatable(2)
    person.silent("NpuCardUnhealthy")


def test_a_card_that_is_too_hot(node: Node, person: Person, card: str) -> None:
    says(
        "NpuTemperatureCritical",
        "cordon the card, then delete the Pod that loads it",
        "If it stays hot without load, drain the node",
        "Continue with [NpuTemperatureHigh]",
    )
    node.fault("busy", card)  # the load of the Pod
    node.fault("hot", card)
    description = person.called("NpuTemperatureCritical", card)
    person.type(" cordon ", card)
    node.wait_allocatable(1)
    person.delete(description)
    node.fault("idle", card)
    person.silent("NpuTemperatureCritical")

    person.called("NpuTemperatureHigh", card)
    node.fault("ok", card)  # its fan
    person.silent("NpuTemperatureHigh")
    person.type(" uncordon ", card)
    node.wait_allocatable(2)


def test_errors_that_rise(node: Node, person: Person, card: str) -> None:
    says(
        "NpuErrorsRising",
        "the logs of these Pods",
        "`dmesg` on the node",
        "restart Pods that failed",
        "If errors continue, cordon and replace it",
    )
    person.prometheus.wait("npu:errors", len(person.prometheus.query("furiosa_npu_error")))
    node.fault("errors", card)
    description = person.called("NpuErrorsRising", card)
    assert re.search(r"counted \d+ errors within", description)
    node.cluster.enter(
        "bash", "-c", script(node, "kubectl -n default logs worker", person.directory)
    )
    person.type_there("dmesg")
    person.type(" cordon ", card)
    person.delete(description)
    node.wait_allocatable(1)
    node.fault("ok", card)  # replaced
    person.silent("NpuErrorsRising")
    person.type(" uncordon ", card)
    node.wait_allocatable(2)


def test_a_card_that_was_cordoned(node: Node, person: Person, card: str) -> None:
    says(
        "NpuCardCordoned",
        "*info* has the reason",
        "uncordon the card: `kubectl -n kube-system exec $POD -- npu-agent uncordon npu0`",
    )
    person.type(" cordon ", card)
    assert "The status page has the reason" in person.called("NpuCardCordoned", card)
    assert "cordoned: …" in person.row(card)
    person.type(" uncordon ", card)
    person.silent("NpuCardCordoned")
    node.wait_allocatable(2)
    assert node.pod("worker")["status"]["phase"] == "Running", "its Pod was left alone"


def test_a_card_that_is_missing(node: Node, person: Person, card: str) -> None:
    says(
        "NpuCardMissing",
        "on the node, `lspci -d 1ed2:`",
        "`dmesg`",
        "delete Pods of the description that hang",
        "drain the node, and power it off and on",
    )
    node.fault("gone", card)
    description = person.called("NpuCardMissing", card)
    person.type_there("lspci -d", "dmesg")
    person.delete(description)
    person.type("kubectl drain")
    node.fault("back", card)  # as after a start of the node
    person.silent("NpuCardMissing")
    node.kubectl("uncordon", node.name)
    node.wait_allocatable(2)
