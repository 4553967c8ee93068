"""What is seen of claims, devices and their Pods in the cluster and in containers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.e2e.manifests import DRIVER, Thing
from tests.e2e.node import SOON, Node

CONFIG: dict[str, Any] = {"allocation": {"api": "auto"}}
NO_CARD = "cannot allocate all claims"
"""What the scheduler says of a Pod for whose claim there is no card."""


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


def inside(node: Node, name: str, *command: str, container: str = "main") -> str:
    """What a command prints in a container, whether it fails or not."""
    where = (f"pod/{name}", "--namespace=default", f"--container={container}")
    return node.kubectl("exec", *where, "--", *command, check=False)


def seen(node: Node, name: str, container: str = "main") -> Seen:
    """What a container has: each of its nodes is proven to open for reading and writing."""
    script = (
        'for n in /dev/npu* /dev/rngd/*; do [ ! -e "$n" ] || { : <>"$n" && echo "$n"; }; done;'
        "env | grep -E '^(NPU|FURIOSA)_'; echo done"
    )
    *lines, last = inside(node, name, "sh", "-c", script, container=container).splitlines()
    assert last == "done", (lines, last)
    return Seen(
        nodes=frozenset(line for line in lines if line.startswith("/dev/")),
        environment=dict(line.split("=", 1) for line in lines if "=" in line),
    )


def verified(node: Node, name: str, expect: int, container: str = "main") -> Seen:
    """What a container has, once `npu-agent verify` has found exactly that many cards in it."""
    command = ("npu-agent", "verify", "--expect", str(expect))
    said = inside(node, name, *command, container=container)
    assert "wrong" not in said, said
    assert said.count("each one opens for reading and writing") == expect, said
    found = seen(node, name, container)
    assert found.cards == found.named, found
    assert len(found.cards) == expect
    return found


def run(node: Node, *things: Thing) -> None:
    """Creates what is given and waits until all Pods of it run."""
    node.apply(list(things))
    for thing in things:
        if thing["kind"] == "Pod":
            running(node, thing["metadata"]["name"])


def running(node: Node, name: str, timeout: float = SOON) -> None:
    """Waits until a Pod runs, with all of its containers."""

    def reached() -> bool:
        status = node.pod(name)["status"]
        assert status["phase"] == "Running", status
        return all(one["ready"] for one in status["containerStatuses"])

    node.wait_for(f"Pod {name} to run", reached, timeout)


def waits(node: Node, name: str) -> None:
    """The scheduler has found no card for a Pod."""
    node.wait_unschedulable(name, NO_CARD)


def said(node: Node, name: str, text: str, timeout: float = 3 * SOON) -> str:
    """The message of an Event of a Pod, once there is one with this text.

    The agent waits 35 s for a holder before it refuses a claim.
    """

    def message() -> str:
        about = f"involvedObject.name={name}"
        events = node.objects("event", "default", fieldSelector=about)
        messages = [str(event["message"]) for event in events]
        (found, *_) = [each for each in messages if text in each] or [""]
        assert found, messages
        return found

    return node.wait_for(f"an Event of {name} with {text!r}", message, timeout)


def claim_of(node: Node, name: str) -> Thing:
    """The claim that was made for a Pod, or that it names."""
    found = node.pod(name)
    (one,) = found["spec"]["resourceClaims"]
    if "resourceClaimName" not in one:
        (one,) = found["status"]["resourceClaimStatuses"]
    return node.get("resourceclaim", one["resourceClaimName"], "default")


def allocated(node: Node, name: str) -> list[str]:
    """The devices that a Pod's claim was given."""
    results = claim_of(node, name)["status"]["allocation"]["devices"]["results"]
    assert {(one["driver"], one["pool"]) for one in results} == {(DRIVER, node.name)}
    return [one["device"] for one in results]


def slices(node: Node) -> list[Thing]:
    """The node's ResourceSlices, as the API server has them."""
    wanted = f"spec.nodeName={node.name},spec.driver={DRIVER}"
    return node.objects("resourceslice", fieldSelector=wanted)


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
    prepared = json.loads(record.read_text(encoding="utf-8"))["prepared"].values()
    return {f"{one['namespace']}/{one['name']}" for one in prepared}


def specs(node: Node) -> set[str]:
    """The names of the CDI specs of claims on the node."""
    return {path.name for path in (node.cluster.run_dir / "cdi").glob("furiosa.ai-claim-*.json")}
