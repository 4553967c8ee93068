"""Which Pods come to which Nodes: bin packing, who has to use it, and Nodes kept for NPU Pods.

One Node is real. The others exist for schedulers only: no kubelet runs what is placed there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import ClusterError
from tests.e2e.fakes import beat, fakes, placed
from tests.e2e.journey.steps import Journey, pod_spec
from tests.e2e.manifests import RESOURCE, container, deployment
from tests.e2e.node import NAMESPACE

BINPACK = "npu-binpack-scheduler"
DEFAULT = "default-scheduler"


# --- bin packing -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def binpack(node: Journey) -> Iterator[None]:
    """The second scheduler runs, as the component has it."""
    with node.components("binpack-scheduler"):
        node.rolled_out(f"deployment/{BINPACK}")
        yield


@pytest.fixture
def four_nodes(installed: Journey) -> Iterator[Journey]:
    """Beside the real Node three like it, with two NPUs each."""
    node = installed
    with fakes(node):
        yield node


def place_four(node: Journey, scheduler: str) -> list[str]:
    """Four Pods that ask for one NPU each, one after the other; returns their Nodes."""
    names = [f"small-{number}" for number in range(4)]
    for name in names:
        node.create(name, 1, schedulerName=scheduler)
    return placed(node, names)


def test_the_default_scheduler_spreads_and_leaves_no_whole_node(four_nodes: Journey) -> None:
    assert len(set(place_four(four_nodes, DEFAULT))) > 2
    four_nodes.create("large", 2)

    beat(four_nodes)
    four_nodes.wait_unschedulable("large", f"4 Insufficient {RESOURCE}")


@pytest.mark.usefixtures("binpack")
def test_the_binpack_scheduler_takes_the_fewest_nodes(four_nodes: Journey) -> None:
    used = place_four(four_nodes, BINPACK)
    assert sorted(used.count(name) for name in set(used)) == [2, 2]
    # So there is room for Pods that ask for a whole Node.
    for name in ("large-1", "large-2"):
        four_nodes.create(name, 2, schedulerName=BINPACK)
    large = placed(four_nodes, ["large-1", "large-2"])
    assert len(set(used) | set(large)) == 4


@pytest.mark.usefixtures("binpack")
def test_what_the_binpack_scheduler_places_runs(installed: Journey) -> None:
    installed.create("packed", 2, schedulerName=BINPACK)
    installed.wait_phase("packed", "Running")
    assert installed.environment("packed", "NPU_DEVNAME") == "npu0pe0-1,npu1pe0-1"


# --- the name of the scheduler -----------------------------------------------------------------


@pytest.fixture
def refuse(node: Journey) -> Iterator[Journey]:
    """scheduler-name-refuse is in force."""
    with node.components("scheduler-name-refuse"):
        trial = pod_spec(RESOURCE)
        node.wait_for("the refusal", lambda: node.refused("trial", trial))
        yield node
    node.wait_for("the end of the refusal", lambda: node.admitted("trial", trial))


INIT = pod_spec(initContainers=[container("first", {RESOURCE: 1})])
"""A Pod whose init container alone asks for an NPU."""


def test_a_wrong_scheduler_is_refused_and_the_right_one_named(refuse: Journey) -> None:
    for spec, resource, scheduler in (
        (pod_spec(RESOURCE), RESOURCE, DEFAULT),
        (pod_spec(RESOURCE, schedulerName="third"), RESOURCE, "third"),
        (pod_spec("furiosa.ai/rngd"), "furiosa.ai/rngd", DEFAULT),
        (INIT, RESOURCE, DEFAULT),
    ):
        assert (
            f"Pod train asks for {resource} and has spec.schedulerName {scheduler}: "
            f"write schedulerName: {BINPACK} into the spec of the Pod"
        ) in refuse.refused("train", spec)


def test_the_right_scheduler_and_pods_without_npus_are_taken(refuse: Journey) -> None:
    cases = {
        "no NPU": pod_spec(),
        "not ours": pod_spec("example.com/npu"),
        "the right name": pod_spec(RESOURCE, schedulerName=BINPACK),
        "init container": INIT | {"schedulerName": BINPACK},
        "born with a Node": pod_spec(RESOURCE, nodeName="fake-1"),
    }
    got = {case: refuse.admitted("train", spec)["schedulerName"] for case, spec in cases.items()}
    assert got == {case: spec.get("schedulerName", DEFAULT) for case, spec in cases.items()}


def test_a_request_without_a_limit_gets_past(refuse: Journey) -> None:
    spec = pod_spec()
    spec["containers"][0] |= {"resources": {"requests": {RESOURCE: "1"}}}
    assert "Limit must be set for non overcommitable resources" in refuse.refused("train", spec)


def test_the_owner_of_a_deployment_reads_the_refusal(refuse: Journey) -> None:
    refuse.apply(deployment("train", container(limits={RESOURCE: 1})))

    def refused() -> bool:
        status = refuse.get("deployment", "train", "default")["status"]
        failures = [c["message"] for c in status["conditions"] if c["type"] == "ReplicaFailure"]
        return f"write schedulerName: {BINPACK}" in failures[0]

    try:
        refuse.wait_for("the Deployment to say why it has no Pod", refused)
    finally:
        refuse.kubectl("delete", "deployment", "train", "--namespace=default")


@pytest.fixture
def fill(node: Journey) -> Iterator[Journey]:
    """scheduler-name-fill is in force."""
    with node.components("scheduler-name-fill"):

        def filled() -> bool:
            try:
                taken = node.admitted("trial", pod_spec(RESOURCE))
            except ClusterError:  # the other policy is in force, and refuses the default name
                return False
            return bool(taken["schedulerName"] == BINPACK)

        node.wait_for("the name to be filled in", filled)
        yield node
    node.wait_for("the name to be left as it is", lambda: not filled())


def test_the_name_is_filled_in_for_pods_with_npus_alone(fill: Journey) -> None:
    cases = {
        "none named": (pod_spec(RESOURCE), BINPACK),
        "the default named": (pod_spec(RESOURCE, schedulerName=DEFAULT), BINPACK),
        "init container": (INIT, BINPACK),
        "another resource": (pod_spec("furiosa.ai/rngd"), BINPACK),
        "another named": (pod_spec(RESOURCE, schedulerName="third"), "third"),
        "no NPU": (pod_spec(), DEFAULT),
        "not ours": (pod_spec("example.com/npu"), DEFAULT),
        "born with a Node": (pod_spec(RESOURCE, nodeName="fake-1"), DEFAULT),
    }
    got = {case: fill.admitted("train", spec)["schedulerName"] for case, (spec, _) in cases.items()}
    assert got == {case: wanted for case, (_, wanted) in cases.items()}


def test_both_policies_go_together(refuse: Journey, fill: Journey) -> None:
    assert fill.admitted("train", pod_spec(RESOURCE))["schedulerName"] == BINPACK
    third = pod_spec(RESOURCE, schedulerName="third")
    assert "has spec.schedulerName third" in refuse.refused("train", third)


# --- the taint ---------------------------------------------------------------------------------


@pytest.fixture
def tainted(installed: Journey) -> Iterator[Journey]:
    """Nodes with NPUs are kept for those who tolerate it."""
    node = installed

    def taint() -> bool:
        # By the agent's label, which comes a moment after its Pod.
        which = ("-l", "beta.furiosa.ai/npu.count")
        said = node.kubectl("taint", "nodes", *which, f"{RESOURCE}=present:NoSchedule")
        return "tainted" in said

    node.wait_for("the Node to be tainted", taint)
    yield node
    node.kubectl("taint", "nodes", "--all", f"{RESOURCE}:NoSchedule-")


@pytest.mark.parametrize("npus", [0, 1])
def test_the_taint_keeps_others_away(tainted: Journey, npus: int) -> None:
    tainted.create("stranger", npus)
    tainted.wait_unschedulable("stranger", "1 node(s) had untolerated taint(s)")


def test_whoever_tolerates_the_taint_gets_an_npu(tainted: Journey) -> None:
    with tainted.components("taint-example"):
        assert "NPU_DEVNAME=npu" in tainted.finished("npu-tainted-example")


def test_the_agent_tolerates_the_taint(tainted: Journey) -> None:
    before, _ = tainted.agent_run()
    name = tainted.agent()["metadata"]["name"]
    tainted.kubectl("delete", "pod", name, "--namespace", NAMESPACE)
    tainted.wait_for(
        "a new agent", lambda: tainted.agent_run()[0] != before and tainted.agent_ready()
    )
    tainted.wait_allocatable(2)
