"""Pods that ask by the resource names of the vendor, on a node that offers cards by DRA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.dra.claims import Thing, devices, inside, run, seen, small, template, verified, waits
from tests.e2e.dra.claims import request as wanted
from tests.e2e.node import IMAGE, PROJECT, Node

CLASSES = PROJECT / "k8s" / "components" / "dra-classes" / "deviceclasses.yaml"
NPU = "beta.furiosa.ai/npu"


@pytest.fixture(scope="module", autouse=True)
def classes(node: Node) -> Iterator[None]:
    """The component's DeviceClasses are there."""
    made = list(yaml.safe_load_all(CLASSES.read_text()))
    node.cluster.apply(made)
    yield
    for one in made:
        node.cluster.kubectl("delete", "deviceclass", one["metadata"]["name"])


def old(name: str, *containers: dict[str, str], initial: dict[str, str] | None = None) -> Thing:
    """A Pod without a claim; each container asks for these resources."""

    def container(title: str, resources: dict[str, str], command: str) -> dict[str, Any]:
        return {
            "name": title,
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", command],
            "resources": {"limits": resources},
        }

    before = {"initContainers": [container("before", initial or {}, "npu-agent verify")]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": "Never",
            **(before if initial else {}),
            "containers": [
                container(f"c{index}", each, "exec sleep 100000")
                for index, each in enumerate(containers)
            ],
        },
    }


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (NPU, {"warboy", "rngd"}),
        ("alpha.furiosa.ai/npu", {"warboy", "rngd"}),
        ("furiosa.ai/npu", {"warboy", "rngd"}),
        ("furiosa.ai/warboy", {"warboy"}),
        ("furiosa.ai/rngd", {"rngd"}),
    ],
)
def test_each_name_gives_a_card(node: Node, name: str, kinds: set[str]) -> None:
    run(node, old("train", {name: "1"}))
    (card,) = verified(node, "train", 1, "c0").cards
    assert devices(node)[card]["attributes"]["arch"]["string"] in kinds


def test_each_container_has_its_own_cards(node: Node) -> None:
    run(node, old("pair", {NPU: "1", "memory": "64Mi"}, {NPU: "2"}, {"memory": "64Mi"}))
    one = verified(node, "pair", 1, "c0").cards
    two = verified(node, "pair", 2, "c1").cards
    assert not one & two
    assert not seen(node, "pair", "c2").nodes


def test_several_names_in_one_container_are_all_in_its_environment(node: Node) -> None:
    run(node, old("both", {"furiosa.ai/warboy": "1", "furiosa.ai/rngd": "1"}))
    found = verified(node, "both", 2, "c0")
    kinds = {devices(node)[card]["attributes"]["arch"]["string"] for card in found.cards}
    assert kinds == {"warboy", "rngd"}


def test_init_containers_use_the_cards_of_later_ones(node: Node) -> None:
    run(node, old("staged", {NPU: "1"}, initial={NPU: "1"}))
    verified(node, "staged", 1, "c0")
    assert "wrong" not in node.cluster.kubectl("logs", "staged", "--container", "before")


def test_claims_and_names_share_the_cards(node: Node) -> None:
    run(node, template("six", wanted(arch="rngd", count=6)), small("claims", of_template="six"))
    run(node, old("names", {NPU: "2"}))
    held = seen(node, "claims").cards, verified(node, "names", 2, "c0").cards
    assert not held[0] & held[1]
    node.cluster.apply(small("late"))
    waits(node, "late")
    assert inside(node.cluster, "names", "true", container="c0") == ""
