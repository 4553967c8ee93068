"""The examples of kubernetes-sigs/dra-example-driver run with our DeviceClass in place of theirs.

They are not part of this repository: $DRA_EXAMPLES is the directory demo/examples of a checkout, or
`make e2e-long DRA_EXAMPLES=...`. CARDS has those that run, LEFT_OUT the others and why.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.dra.claims import inside
from tests.e2e.dra.conftest import CARDS as EVERY_CARD
from tests.e2e.manifests import SLEEP, WORKLOAD
from tests.e2e.node import SOON, Node

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("classes")]

CARDS = {
    "basic-resourceclaimtemplate": 2,
    "basic-multiple-requests": 2,
    "basic-shared-claim-across-containers": 1,
    "basic-shared-claim-across-pods": 1,
    "admin-access": EVERY_CARD,  # it asks for all of the node
    "initcontainer-shared-gpu": 1,
    "extended-resource-request": 2,
    "binding-conditions": 1,  # a driver that needs none is allocated from without them
    "partitionable-devices": 2,  # any two devices of the class: here two whole cards
}
"""How many cards the Pods of each example have together."""

LEFT_OUT = {
    "basic-resourceclaim-opaque-config": "parameters of that driver: a GpuConfig",
    "cel-selector": "an attribute of that driver: model",
    "prioritized-alternatives": "an attribute of that driver: model",
    "gpu-allow-multiple-allocations": "devices that several claims may have at once",
    "gpu-allow-multiple-allocations-partitionable": "devices that several claims may have at once",
    "native-resource-request": "that driver's profile of CPUs",
    "net-consumable-capacity": "that driver's profile of network cards",
    "device-taints-tolerations": "DeviceTaintRules: an API that is off by default",
    "podgroup-resourceclaimtemplate": "PodGroups: an API that is off by default",
}
"""The other examples, and what of their own they need."""

SCRIPTS = {"containers": SLEEP, "initContainers": "ls /dev/npu* /dev/rngd/* | grep -q npu"}
"""What the containers do here."""


def examples() -> Path:
    """The directory with all examples."""
    where = os.environ.get("DRA_EXAMPLES")
    assert where, "set DRA_EXAMPLES to demo/examples of a checkout of dra-example-driver"
    return Path(where)


def test_all_examples_are_known() -> None:
    assert {one.name for one in examples().iterdir()} == CARDS.keys() | LEFT_OUT.keys()


def example(name: str) -> list[dict[str, Any]]:
    """An example's objects, for this cluster: our names, and an image that it has."""
    text = (examples() / name / f"{name}.yaml").read_text()
    text = text.replace("gpu.example.com", "npu.furiosa.ai")
    text = text.replace("example.com/gpu", "beta.furiosa.ai/npu")
    things = [thing for thing in yaml.safe_load_all(text) if thing]
    for pod in (thing for thing in things if thing["kind"] == "Pod"):
        pod["spec"]["terminationGracePeriodSeconds"] = 0
        for field, script in SCRIPTS.items():
            for one in pod["spec"].get(field, ()):
                command = ["sh", "-c", script]
                one.update(image=WORKLOAD, imagePullPolicy="Never", args=[], command=command)
    return things


@pytest.mark.parametrize("name", CARDS)
def test_an_example_runs(node: Node, name: str) -> None:
    things = example(name)
    (namespace,) = (one["metadata"]["name"] for one in things if one["kind"] == "Namespace")
    node.apply([one for one in things if one["kind"] == "Namespace"])
    try:
        node.wait_for(
            "the namespace's account",
            lambda: node.kubectl("get", "serviceaccount", "default", "-n", namespace),
        )
        node.apply([one for one in things if one["kind"] != "Namespace"])

        def running() -> list[dict[str, Any]]:
            found = node.objects("pod", namespace)
            assert found
            assert all(one["status"]["phase"] == "Running" for one in found)
            return found

        cards: set[str] = set()
        for pod in node.wait_for(f"{name} to run", running, 2 * SOON):
            for container in pod["spec"]["containers"]:
                where = {"container": container["name"], "namespace": namespace}
                script = "ls /dev /dev/rngd 2>/dev/null | grep -o 'npu[0-9]*' | sort -u"
                said = inside(node.cluster, pod["metadata"]["name"], "sh", "-c", script, **where)
                assert said.split(), container["name"]
                cards |= set(said.split())
        assert len(cards) == CARDS[name], cards
    finally:
        node.kubectl("delete", "namespace", namespace, "--timeout=60s")
