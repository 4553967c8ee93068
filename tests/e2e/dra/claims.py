"""Claims and Pods that use them, and what is seen of them in the cluster and in containers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.cluster import Cluster
from tests.e2e.node import IMAGE, SOON, WORKLOAD, Node

API = "resource.k8s.io/v1"
DRIVER = "npu.furiosa.ai"
CONFIG: dict[str, Any] = {"allocation": {"api": "auto"}}
ONE = "one-npu"
"""A template for one card of any kind."""

Thing = dict[str, Any]
Containers = Mapping[str, Sequence[Mapping[str, str]]]
"""For each container, its `resources.claims`."""

USE: Containers = {"main": ({"name": "npus"},)}


def request(name: str = "npu", *, arch: str = "", count: int = 1, **fields: Any) -> Thing:
    """A request for cards of one kind."""
    return {"name": name, "exactly": {**wanted(arch), "count": count, **fields}}


def wanted(arch: str = "") -> Thing:
    """Which cards a request takes."""
    expression = f'device.attributes["{DRIVER}"].arch == "{arch}"'
    selectors = {"selectors": [{"cel": {"expression": expression}}]} if arch else {}
    return {"deviceClassName": DRIVER, **selectors}


def claim(name: str, *requests: Thing, namespace: str = "default", **devices: Any) -> Thing:
    """A ResourceClaim; by default for one card of any kind."""
    return {
        "apiVersion": API,
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"devices": {"requests": requests or [request()], **devices}},
    }


def template(name: str, *requests: Thing, namespace: str = "default", **devices: Any) -> Thing:
    """A ResourceClaimTemplate; by default for one card of any kind."""
    made = claim(name, *requests, namespace=namespace, **devices)
    return {**made, "kind": "ResourceClaimTemplate", "spec": {"spec": made["spec"]}}


def pod(
    name: str,
    *,
    of_template: str = "",
    of_claim: str = "",
    containers: Containers = USE,
    namespace: str = "default",
    image: str = IMAGE,
    command: str = "exec sleep 100000",
    **spec: Any,
) -> Thing:
    """A Pod with the claim `npus`; of the template ONE, if neither is named.

    The agent's image has npu-agent, which judges what a container was given.
    """
    source = (
        {"resourceClaimName": of_claim}
        if of_claim
        else {"resourceClaimTemplateName": of_template or ONE}
    )
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": "Never",
            "resourceClaims": [{"name": "npus", **source}],
            "containers": [
                {
                    "name": container,
                    "image": image,
                    "imagePullPolicy": "Never",
                    "command": ["sh", "-c", command],
                    "resources": {"claims": list(claims)},
                }
                for container, claims in containers.items()
            ],
            **spec,
        },
    }


def small(name: str, **fields: Any) -> Thing:
    """A Pod as `pod`, of an image that starts as fast as one can."""
    return pod(name, image=WORKLOAD, **fields)


@dataclass(frozen=True)
class Seen:
    """What a container has."""

    nodes: frozenset[str]
    environment: Mapping[str, str]

    @property
    def cards(self) -> frozenset[int]:
        """The numbers of the cards whose nodes it has."""
        found = (re.match(r"/dev/(?:rngd/)?npu(\d+)", node) for node in self.nodes)
        return frozenset(int(match[1]) for match in found if match)

    @property
    def named(self) -> frozenset[int]:
        """The numbers of the cards that its environment names."""
        return frozenset(map(int, re.findall(r"npu(\d+)pe", self.environment["NPU_DEVNAME"])))


def inside(
    cluster: Cluster, name: str, *command: str, container: str = "main", namespace: str = "default"
) -> str:
    """What a command prints in a container, whether it fails or not."""
    where = ("--namespace", namespace, name, "--container", container)
    return cluster.kubectl("exec", *where, "--", *command, check=False)


def seen(node: Node, name: str, container: str = "main", namespace: str = "default") -> Seen:
    """What a container has: each of its nodes is proven to open for reading and writing."""
    script = (
        'for n in /dev/npu* /dev/rngd/*; do [ ! -e "$n" ] || { : <>"$n" && echo "$n"; }; done;'
        "env | grep -E '^(NPU|FURIOSA)_'; echo done"
    )
    where = {"container": container, "namespace": namespace}
    *lines, last = inside(node.cluster, name, "sh", "-c", script, **where).splitlines()
    assert last == "done", (lines, last)
    return Seen(
        nodes=frozenset(line for line in lines if line.startswith("/dev/")),
        environment=dict(line.split("=", 1) for line in lines if "=" in line),
    )


def verified(
    node: Node, name: str, expect: int, container: str = "main", namespace: str = "default"
) -> Seen:
    """What a container has, once `npu-agent verify` has found exactly that many cards in it."""
    command = ("npu-agent", "verify", "--expect", str(expect))
    said = inside(node.cluster, name, *command, container=container, namespace=namespace)
    assert "wrong" not in said, said
    assert said.count("each one opens for reading and writing") == expect, said
    found = seen(node, name, container, namespace)
    assert found.cards == found.named, found
    assert len(found.cards) == expect
    return found


def run(node: Node, *things: Thing) -> None:
    """Creates what is given and waits until all Pods of it run."""
    node.cluster.apply(list(things))
    for thing in things:
        if thing["kind"] == "Pod":
            running(node, thing["metadata"]["name"], thing["metadata"]["namespace"])


def running(node: Node, name: str, namespace: str = "default", timeout: float = SOON) -> Thing:
    """The Pod, once it runs."""

    def reached() -> Thing:
        found = node.cluster.get("pod", name, namespace)
        assert found["status"]["phase"] == "Running", found["status"]
        assert all(one["ready"] for one in found["status"]["containerStatuses"])
        return found

    return node.cluster.wait_for(f"Pod {name} to run", reached, timeout)


def waits(node: Node, name: str) -> None:
    """The scheduler has found no card for a Pod."""

    def refused() -> bool:
        status = node.pod(name)["status"]
        conditions = {one["type"]: one for one in status.get("conditions", ())}
        assert status["phase"] == "Pending"
        assert "cannot allocate all claims" in conditions["PodScheduled"]["message"]
        return True

    node.cluster.wait_for(f"Pod {name} to wait for a card", refused, SOON)


def said(node: Node, name: str, text: str, timeout: float = 3 * SOON) -> str:
    """The message of an Event of a Pod, once there is one with this text.

    The agent waits 35 s for a holder before it refuses a claim.
    """

    def message() -> str:
        about = f"involvedObject.name={name}"
        events = node.cluster.objects("event", "default", fieldSelector=about)
        messages = [str(event["message"]) for event in events]
        (found, *_) = [each for each in messages if text in each] or [""]
        assert found, messages
        return found

    return node.cluster.wait_for(f"an Event of {name} with {text!r}", message, timeout)


def claim_of(node: Node, name: str) -> Thing:
    """The claim that was made for a Pod, or that it names."""
    found = node.pod(name)
    (one,) = found["spec"]["resourceClaims"]
    if "resourceClaimName" not in one:
        (one,) = found["status"]["resourceClaimStatuses"]
    return node.cluster.get("resourceclaim", one["resourceClaimName"], "default")


def allocated(node: Node, name: str) -> list[str]:
    """The devices that a Pod's claim was given."""
    results = claim_of(node, name)["status"]["allocation"]["devices"]["results"]
    assert {(one["driver"], one["pool"]) for one in results} == {(DRIVER, node.name)}
    return [one["device"] for one in results]


def slices(node: Node) -> list[Thing]:
    """The node's ResourceSlices, as the API server has them."""
    wanted = f"spec.nodeName={node.name},spec.driver={DRIVER}"
    return node.cluster.objects("resourceslice", fieldSelector=wanted)


def devices(node: Node) -> dict[int, Thing]:
    """What is published, by the number of the card."""
    return {
        one["attributes"]["index"]["int"]: one
        for each in slices(node)
        for one in each["spec"].get("devices") or ()
    }


def taints(node: Node, card: int) -> dict[str, str]:
    """The effects of a card's taints, by their keys."""
    return {taint["key"]: taint["effect"] for taint in devices(node)[card].get("taints") or ()}


def prepared(node: Node) -> set[str]:
    """The claims that the node's record has, by namespace and name."""
    record = node.cluster.kubelet_dir / "device-plugins" / ".npu-agent.ledger.json"
    if not record.exists():
        return set()
    return {f"{one['namespace']}/{one['name']}" for one in json.loads(record.read_text())["claims"]}


def specs(node: Node) -> set[str]:
    """The names of the CDI specs of claims on the node."""
    return {path.name for path in (node.cluster.run_dir / "cdi").glob("furiosa.ai-claim-*.json")}
