"""Nodes that exist for schedulers only: nobody runs what is placed there."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from tests.e2e.node import RESOURCE, SOON, Node

FAKES = ("fake-1", "fake-2", "fake-3")


@contextlib.contextmanager
def fakes(node: Node) -> Iterator[None]:
    """Makes Nodes that are like the real one, and takes them away with all that is placed there."""
    made = [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}} for name in FAKES]
    status = node.cluster.get("node", node.name)["status"]
    node.cluster.apply(made)
    try:
        beat(node, capacity=status["capacity"], allocatable=status["allocatable"])

        def ready() -> bool:
            found = [node.cluster.get("node", name) for name in FAKES]
            assert not [one["spec"]["taints"] for one in found if "taints" in one["spec"]]
            offered = [one["status"]["allocatable"].get(RESOURCE) for one in found]
            return offered == [status["allocatable"].get(RESOURCE)] * len(FAKES)

        node.cluster.wait_for("the fake Nodes to take Pods", ready, SOON)
        yield
    finally:
        # Nobody confirms the end of what was placed there.
        node.cluster.kubectl("delete", "pod", "--all", "-n=default", "--force", "--grace-period=0")
        node.cluster.kubectl("delete", "node", *FAKES)


def beat(node: Node, **status: Any) -> None:
    """Says of the fake Nodes that they are ready, which holds for some 40 s."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "reason": "Test"}
    patch = json.dumps({"status": {"conditions": [ready], **status}})
    node.cluster.kubectl("patch", "node", *FAKES, "--subresource=status", "--patch", patch)


def placed(node: Node, names: list[str]) -> list[str]:
    """Waits until each Pod has its Node; returns these."""

    def nodes() -> list[str]:
        beat(node)
        return [node.pod(name)["spec"]["nodeName"] for name in names]

    return node.cluster.wait_for("the Pods to be placed", nodes, SOON)
