"""Nodes that exist for schedulers only: no kubelet runs what is placed there."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from tests.e2e.manifests import RESOURCE, thing
from tests.e2e.node import Node

FAKES = ("fake-1", "fake-2", "fake-3")


@contextlib.contextmanager
def fakes(node: Node) -> Iterator[None]:
    """Makes Nodes that are like the real one, and takes them away with all that is placed there."""
    status = node.get("node", node.name)["status"]
    node.apply([thing("Node", name, namespace="") for name in FAKES])
    try:
        beat(node, capacity=status["capacity"], allocatable=status["allocatable"])

        def ready() -> bool:
            found = [node.get("node", name) for name in FAKES]
            assert not [one["spec"]["taints"] for one in found if "taints" in one["spec"]]
            offered = [one["status"]["allocatable"].get(RESOURCE) for one in found]
            return offered == [status["allocatable"].get(RESOURCE)] * len(FAKES)

        node.wait_for("the fake Nodes to take Pods", ready)
        yield
    finally:
        # No kubelet confirms the end of what was placed there.
        node.delete_by_force()
        node.kubectl("delete", "node", *FAKES)


def beat(node: Node, *names: str, **status: Any) -> None:
    """Says of Nodes, by default the fake ones, that they are ready, which holds for some 40 s."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "reason": "Test"}
    patch = json.dumps({"status": {"conditions": [ready], **status}})
    node.kubectl("patch", "node", *(names or FAKES), "--subresource=status", "--patch", patch)


def placed(node: Node, names: list[str]) -> list[str]:
    """Waits until each Pod has its Node; returns these."""

    def nodes() -> list[str]:
        beat(node)
        return [node.pod(name)["spec"]["nodeName"] for name in names]

    return node.wait_for("the Pods to be placed", nodes)


PAPER = "paper-node"
"""A Node with room for Pods and no devices but those that a test publishes."""


@contextlib.contextmanager
def paper(node: Node) -> Iterator[None]:
    """Makes that Node, and takes it away with all slices, and all Pods and claims in `default`."""
    node.apply(thing("Node", PAPER, namespace=""))
    try:
        room = {"cpu": "8", "memory": "8Gi", "pods": "50"}
        beat(node, PAPER, capacity=room, allocatable=room)
        yield
    finally:
        node.delete_by_force()
        kinds = "resourceclaims,resourceclaimtemplates"
        node.kubectl("delete", kinds, "--all", "--namespace=default")
        node.kubectl("delete", "resourceslices", "--all")
        node.kubectl("delete", "node", PAPER, "--ignore-not-found")
