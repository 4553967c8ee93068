"""Pods that ask by the resource names of the vendor, on a node that offers cards by DRA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.images import scheduler
from tests.e2e.dra.claims import (
    API,
    DRIVER,
    Thing,
    devices,
    inside,
    run,
    seen,
    small,
    template,
    verified,
    waits,
)
from tests.e2e.dra.claims import request as wanted
from tests.e2e.fakes import FAKES, fakes, placed
from tests.e2e.journey.steps import BUSYBOX, Journey, pod_spec
from tests.e2e.node import IMAGE, SOON, WORKLOAD, Node

pytestmark = pytest.mark.usefixtures("classes")

NPU = "beta.furiosa.ai/npu"
BINPACK = "npu-binpack-scheduler"


KINDS = {
    "furiosa.ai/warboy": {"warboy"},
    "furiosa.ai/rngd": {"rngd"},
    NPU: {"warboy", "rngd"},
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


def old(
    name: str,
    *containers: dict[str, str],
    initial: dict[str, str] | None = None,
    **spec: Any,
) -> Thing:
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
            **spec,
        },
    }


def test_each_name_gives_a_card(node: Node) -> None:
    pods = {f"train-{number}": name for number, name in enumerate(KINDS)}
    first, second, *others = (old(pod, {name: "1"}) for pod, name in pods.items())
    run(node, first, second)  # before those who take any card
    run(node, *others)
    cards = {pod: verified(node, pod, 1, "c0").cards for pod in pods}
    assert len(frozenset.union(*cards.values())) == len(pods)
    published = devices(node)
    for pod, (card,) in cards.items():
        assert published[card]["attributes"]["arch"]["string"] in KINDS[pods[pod]]


def test_the_example_pod_runs_unchanged(node: Node) -> None:
    user = Journey(node.cluster)
    user.tag(WORKLOAD, BUSYBOX)
    with user.components("example-pod"):
        printed = user.finished("npu-example")
    # The first card of the family that is given first.
    assert "NPU_DEVNAME=npu2pe0-3,npu2pe4-7" in printed
    assert "FURIOSA_DEVICES=npu:2:0-3,npu:2:4-7" in printed
    assert "rngd" in {line.split()[-1] for line in printed.splitlines()}


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


def test_deployments_and_jobs_under_a_quota_of_the_name(node: Node) -> None:
    most = {f"requests.{NPU}": "2"}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "npus", "namespace": "default"},
        "spec": {"hard": most},
    }
    three = {"replicas": 3, **controlled("serve", {NPU: "1"})}
    once = {"completions": 1, "backoffLimit": 0, **controlled("check", {"furiosa.ai/rngd": "1"})}
    del once["selector"]
    (only,) = once["template"]["spec"]["containers"]
    only["command"] = ["npu-agent", "verify", "--expect", "1"]
    once["template"]["spec"]["restartPolicy"] = "Never"
    meta = {"metadata": {"name": "train", "namespace": "default"}}
    node.cluster.apply(quota)

    def counted() -> bool:
        found = node.cluster.get("resourcequota", "npus", "default")["status"]
        return bool(found["hard"] == most)

    def refused() -> str:
        status = node.cluster.get("deployment", "train", "default")["status"]
        assert status.get("readyReplicas") == 2, status
        (why,) = [c["message"] for c in status["conditions"] if c["type"] == "ReplicaFailure"]
        return str(why)

    def complete() -> bool:
        return bool(node.cluster.get("job", "train", "default")["status"]["succeeded"] == 1)

    try:
        node.cluster.wait_for("the quota to be in force", counted, SOON)
        node.cluster.apply(
            [
                {"apiVersion": "apps/v1", "kind": "Deployment", **meta, "spec": three},
                {"apiVersion": "batch/v1", "kind": "Job", **meta, "spec": once},
            ]
        )
        why = node.cluster.wait_for("two replicas, and a third refused", refused, 2 * SOON)
        assert f"exceeded quota: npus, requested: requests.{NPU}=1, used: requests.{NPU}=2" in why
        one, two = (
            verified(node, found["metadata"]["name"], 1, "c0").cards
            for found in node.cluster.objects("pod", "default", labelSelector="app=serve")
        )
        assert not one & two
        node.cluster.wait_for("the Job to find its card", complete, 2 * SOON)
    finally:
        how = ("--namespace=default", "--ignore-not-found", "--cascade=foreground")
        for what in ("deployment/train", "job/train", "resourcequota/npus"):
            node.cluster.kubectl("delete", what, *how)


def controlled(app: str, resources: dict[str, str]) -> dict[str, Any]:
    """What a Deployment's or Job's spec says of its Pods: one container with these resources."""
    labels = {"app": app}
    spec = old(app, resources)["spec"]
    del spec["restartPolicy"]
    return {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": spec},
    }


def test_the_binpack_scheduler_fills_nodes(node: Node, binpack: Journey) -> None:
    names = [f"small-{number}" for number in range(4)]
    with fakes(binpack):
        node.cluster.apply([two_cards(name) for name in FAKES])
        try:
            for name in names:
                node.cluster.apply(old(name, {NPU: "1"}, schedulerName=BINPACK))
            used = placed(node, names)
            # The node with eight cards is the one that would be the least full.
            assert sorted(used.count(name) for name in set(used)) == [2, 2]
            assert node.name not in used
            node.cluster.apply(old("large", {NPU: "2"}, schedulerName=BINPACK))
            assert {*used, *placed(node, ["large"])} == set(FAKES)
        finally:
            made = [two_cards(name)["metadata"]["name"] for name in FAKES]
            node.cluster.kubectl("delete", "resourceslice", *made)


def two_cards(name: str) -> Thing:
    """A slice as an agent on a node of this name would have it: two RNGD."""
    attributes = {"type": {"string": "card"}, "arch": {"string": "rngd"}, "cores": {"int": 8}}
    return {
        "apiVersion": API,
        "kind": "ResourceSlice",
        "metadata": {"name": f"00000-{DRIVER}-{name}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": name,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"npu-{at}", "attributes": attributes} for at in range(2)],
        },
    }


def test_the_policies_of_the_schedulers_name(node: Node, binpack: Journey) -> None:
    with binpack.components("scheduler-name-fill", "scheduler-name-refuse"):

        def filled() -> bool:
            return bool(binpack.admitted("trial", pod_spec(NPU))["schedulerName"] == BINPACK)

        third = pod_spec(NPU, schedulerName="third")
        node.cluster.wait_for("the name to be filled in", filled, SOON)
        why = node.cluster.wait_for(
            "another name to be refused", lambda: binpack.refused("trial", third), SOON
        )
        assert f"write schedulerName: {BINPACK} into the spec of the Pod" in why
        run(node, old("filled", {NPU: "1"}))
    assert node.pod("filled")["spec"]["schedulerName"] == BINPACK
    verified(node, "filled", 1, "c0")
