"""Pods that ask by the resource names of the vendor, on a node that offers cards by DRA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.images import scheduler
from tests.e2e.dra.claims import devices, run, seen, verified, waits
from tests.e2e.fakes import FAKES, fakes, placed
from tests.e2e.journey.steps import Journey
from tests.e2e.manifests import (
    DRIVER,
    IMAGE,
    RESOURCE,
    Thing,
    container,
    pod,
    request,
    resource_slice,
    small,
    template,
)
from tests.e2e.node import Node

pytestmark = [pytest.mark.since("1.36"), pytest.mark.usefixtures("classes")]

BINPACK = "npu-binpack-scheduler"

KINDS = {
    "furiosa.ai/warboy": {"warboy"},
    "furiosa.ai/rngd": {"rngd"},
    RESOURCE: {"warboy", "rngd"},
    "alpha.furiosa.ai/npu": {"warboy", "rngd"},
    "furiosa.ai/npu": {"warboy", "rngd"},
}
"""The cards that each name stands for."""


@pytest.fixture(scope="module")
def binpack(node: Node) -> Iterator[Journey]:
    """The second scheduler runs, as the component has it."""
    user = Journey(node.cluster)
    node.cluster.import_image(scheduler().archive)
    with user.components("binpack-scheduler"):
        user.rolled_out(f"deployment/{BINPACK}")
        yield user


def old(name: str, *limits: dict[str, str], **spec: Any) -> Thing:
    """A Pod without a claim; its containers c0, c1 and so on ask for these resources."""
    made = [container(f"c{at}", each, image=IMAGE) for at, each in enumerate(limits)]
    return pod(name, *made, **spec)


def kinds(node: Node, cards: frozenset[int]) -> set[str]:
    published = devices(node)
    return {published[card]["attributes"]["arch"]["string"] for card in cards}


def test_each_name_gives_a_card(node: Node) -> None:
    pods = {name: f"train-{number}" for number, name in enumerate(KINDS)}
    first, second, *others = (old(train, {name: "1"}) for name, train in pods.items())
    run(node, first, second)  # before those who take any card
    run(node, *others)
    cards = {name: verified(node, train, 1, "c0").cards for name, train in pods.items()}
    assert len(frozenset.union(*cards.values())) == len(pods)
    for name, found in cards.items():
        assert kinds(node, found) <= KINDS[name]


def test_each_container_has_its_own_cards(node: Node) -> None:
    """Init containers use those of later ones, and a container may ask by several names."""
    both = {"furiosa.ai/warboy": "1", "furiosa.ai/rngd": "1"}
    before = container("before", {RESOURCE: 1}, image=IMAGE, command="npu-agent verify")
    limits = ({RESOURCE: "1", "memory": "64Mi"}, both, {"memory": "64Mi"})
    run(node, old("three", *limits, initContainers=[before]))
    one = verified(node, "three", 1, "c0").cards
    two = verified(node, "three", 2, "c1").cards
    assert not one & two
    assert kinds(node, two) == {"warboy", "rngd"}
    assert not seen(node, "three", "c2").nodes
    assert "wrong" not in node.kubectl("logs", "three", "--container", "before")


def test_claims_and_names_share_the_cards(node: Node) -> None:
    run(node, template("six", request(arch="rngd", count=6)), small("claims", of_template="six"))
    run(node, old("names", {RESOURCE: "2"}))
    held = seen(node, "claims").cards, verified(node, "names", 2, "c0").cards
    assert not held[0] & held[1]
    node.apply(small("late"))
    waits(node, "late")


def test_the_binpack_scheduler_fills_nodes(node: Node, binpack: Journey) -> None:
    names = [f"small-{number}" for number in range(4)]
    with fakes(binpack):
        slices = [two_cards(name) for name in FAKES]
        node.apply(slices)
        try:
            for name in names:
                node.apply(old(name, {RESOURCE: "1"}, schedulerName=BINPACK))
            used = placed(node, names)
            # The node with eight cards is the one that would be the least full.
            assert sorted(used.count(name) for name in set(used)) == [2, 2]
            assert node.name not in used
            node.apply(old("large", {RESOURCE: "2"}, schedulerName=BINPACK))
            assert {*used, *placed(node, ["large"])} == set(FAKES)
        finally:
            node.kubectl("delete", "resourceslice", *(one["metadata"]["name"] for one in slices))


def two_cards(name: str) -> Thing:
    """A slice as an agent on a node of this name would have it: two RNGD."""
    facts = {"type": {"string": "card"}, "arch": {"string": "rngd"}, "cores": {"int": 8}}
    cards = [{"name": f"npu-{at}", "attributes": facts} for at in range(2)]
    return resource_slice(f"00000-{DRIVER}-{name}", name, cards)
