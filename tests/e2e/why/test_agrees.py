"""`why` agrees with the real scheduler: could a Pod be scheduled now, and on which Nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import pytest

from npu_agent.kube.objects import Pod
from npu_agent.people.cluster.objects import Cluster as Objects
from npu_agent.people.cluster.why import Verdict, why
from tests.cluster import Answer, Cluster
from tests.cluster.node import ClusterError
from tests.e2e.api import ADMIN, MERGE
from tests.e2e.why.corpus import LABEL, Case, Json, case
from tests.people.cluster.build import TYPES, read

PATHS = {
    "Node": "/api/v1/nodes",
    "Pod": "/api/v1/namespaces/default/pods",
    "ResourceClaim": "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
    "DeviceTaintRule": "/apis/resource.k8s.io/v1/devicetaintrules",
}
SEED = 28
DECIDES = 30.0
"""Seconds that the scheduler may take for the Pods of a round."""
UNKNOWN = 0.02
"""The share of answers that may be: it cannot be judged."""

T = TypeVar("T")


@pytest.mark.timeout(240)
def test_why_agrees_with_the_scheduler(cluster: Cluster) -> None:
    agrees(cluster, [case(SEED, number) for number in range(60)])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_why_agrees_with_the_scheduler_on_many(cluster: Cluster) -> None:
    for start in range(0, 500, 100):
        agrees(cluster, [case(SEED + 1, start + number) for number in range(100)])


def agrees(cluster: Cluster, cases: list[Case]) -> None:
    """Each Pod alone at each Node, one round a Node, and then at all of its Nodes."""
    each(cases, lambda one: [create(cluster, thing) for thing in one.objects])
    wrong, unknown, failed, asked = [], 0, 0, 0
    for at in (0, 1, 2, -1):
        round_ = [one for one in cases if at < len(one.nodes)]
        copies = [one.copy(one.nodes[at] if at >= 0 else "") for one in round_]
        each(copies, lambda copy: [create(cluster, claim) for claim in copy[0]])
        there = objects(cluster)
        pods = [read(Pod, one) for one in each(copies, lambda one: create(cluster, one[1]))]
        said = {pod.name: why(pod, of_its_case(there, pod)) for pod in pods}
        found = decisions(cluster, said)
        faults = failures(cluster, said)
        failed += len(faults)
        asked += len(said)
        unknown += sum(verdict.schedulable is None for verdict in said.values())
        wrong += [
            f"{name}: {found[name] or 'not scheduled'}, but {verdict.sentence}\n  "
            + "\n  ".join(f"{node.node}: {node}" for node in verdict.nodes if node.node[:2] != "np")
            for name, verdict in said.items()
            if verdict.schedulable is not None and not right(verdict, found[name])
            if name not in faults
        ]
        clear(cluster, said)
    print(
        f"{asked} Pods of {len(cases)} cases, {unknown} not judged, {len(wrong)} wrong; "
        f"the scheduler itself failed for {failed}"
    )
    assert not wrong, "\n".join(wrong[:20])
    assert unknown <= UNKNOWN * asked
    assert failed <= UNKNOWN * asked


def right(verdict: Verdict, node: str) -> bool:
    return node in verdict.fitting if verdict.schedulable else not node


def decisions(cluster: Cluster, said: dict[str, Verdict]) -> dict[str, str]:
    """Of each Pod the Node that it got; "" if the scheduler found none."""
    found: dict[str, str] = {}

    def decided() -> bool:
        for pod in cluster.objects("pod", "default"):
            name = pod["metadata"]["name"]
            conditions = pod["status"].get("conditions") or ()
            if name in said and (pod["spec"].get("nodeName") or conditions):
                found[name] = pod["spec"].get("nodeName", "")
        # What was just written may reach the scheduler after the Pod: it looks again.
        return all(name in found and (found[name] or not said[name].schedulable) for name in said)

    try:
        cluster.wait_for("the scheduler's decisions", decided, DECIDES)
    except ClusterError:  # the test says which are wrong
        assert set(found) == set(said), set(said) - set(found)
    return found


def failures(cluster: Cluster, said: Iterable[str]) -> set[str]:
    """The Pods for which the scheduler found a Node and then failed to write it down.

    Kubernetes 1.37.2 takes the allocation out of an allocated claim where the Pod has a new one in
    addition. The API server refuses that: "status.allocation: field cannot be modified once set".
    """
    return {
        pod["metadata"]["name"]
        for pod in cluster.objects("pod", "default")
        for condition in pod["status"].get("conditions") or ()
        if condition.get("reason") == "SchedulerError"
        and "status.allocation" in condition["message"]
        and pod["metadata"]["name"] in said
    }


def objects(cluster: Cluster) -> Objects:
    found: dict[str, Any] = {}
    for kind, path in PATHS.items():
        field, type_ = TYPES[kind]
        items = json.loads(cluster._read(path.replace("/namespaces/default", "")))["items"]
        found[field] = tuple(read(type_, one) for one in items)
    return Objects(**found)


def of_its_case(there: Objects, pod: Pod) -> Objects:
    """Only the Nodes that its label allows: the others would take most of the time."""
    case_ = pod.spec.node_selector[LABEL]
    nodes = tuple(one for one in there.nodes if one.metadata.labels.get(LABEL) == case_)
    return msgspec.structs.replace(there, nodes=nodes)


def clear(cluster: Cluster, said: dict[str, Verdict]) -> None:
    """Takes the Pods and all that was allocated for them away."""
    for name in said:
        now = {"gracePeriodSeconds": 0}
        assert ask(cluster, "DELETE", f"{PATHS['Pod']}/{name}", now).status == 200
    prefixes = tuple({f"{name[: name.index('-p')]}-claim" for name in said})
    for claim in cluster.objects("resourceclaim", "default"):
        name = claim["metadata"]["name"]
        if name.startswith(prefixes) or "-extended-resources-" in name:
            path = f"{PATHS['ResourceClaim']}/{name}"
            status = {"status": {"reservedFor": None, "allocation": None}}
            ask(cluster, "PATCH", f"{path}/status", status)
            ask(cluster, "PATCH", path, {"metadata": {"finalizers": None}})
            ask(cluster, "DELETE", path)


def create(cluster: Cluster, thing: Json) -> Json:
    path = PATHS[thing["kind"]]
    answer = ask(cluster, "POST", path, thing)
    assert answer.status == 201, (thing, answer)
    name = thing["metadata"]["name"]
    if thing["kind"] == "Node":
        # The API server has put a taint on it until its kubelet is ready.
        spec = {"spec": {"taints": thing["spec"]["taints"]}}
        assert ask(cluster, "PATCH", f"{path}/{name}", spec).status == 200
    elif thing["kind"] == "ResourceClaim" and "status" in thing:
        answer = ask(cluster, "PATCH", f"{path}/{name}/status", {"status": thing["status"]})
        assert answer.status == 200, answer
    return answer.body


def ask(cluster: Cluster, method: str, path: str, body: Json | None = None) -> Answer:
    kind = MERGE if method == "PATCH" else "application/json"
    return cluster.request(method, path, body, token=ADMIN, headers={"Content-Type": kind})


def each(of: Iterable[T], do: Callable[[T], Any]) -> list[Any]:
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(do, of))
