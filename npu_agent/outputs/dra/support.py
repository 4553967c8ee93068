"""Whether this node can do DRA: what `allocation.api: auto` follows, and `doctor` reports."""

from __future__ import annotations

import re
from dataclasses import dataclass

from npu_agent.kube import Api, node, resourceclaims

OLDEST = (1, 34)
"""The first Kubernetes in which DRA is generally available."""


@dataclass(frozen=True, slots=True)
class Support:
    """Whether DRA can be used here."""

    available: bool
    reason: str
    """Why, or why not, for people."""


async def support(api: Api, node_name: str) -> Support:
    """Asks the API server, and what it knows of this node's kubelet.

    Raises:
        ApiError: it does not say.
    """
    if not await resourceclaims.served(api):
        return Support(False, "the API server does not serve resource.k8s.io/v1")
    status = (await node.read_whole(api, node_name)).get("status")
    info = status.get("nodeInfo") if isinstance(status, dict) else None
    version = info.get("kubeletVersion") if isinstance(info, dict) else None
    if not takes_drivers(version):
        oldest = ".".join(map(str, OLDEST))
        return Support(
            False, f"this node's kubelet is {version or 'unknown'}, and DRA needs {oldest} or later"
        )
    return Support(True, f"the API server serves resource.k8s.io/v1, and the kubelet is {version}")


def takes_drivers(version: object) -> bool:
    """Whether a kubelet of this version, ``v1.36.3``, takes a driver of DRA v1."""
    match = re.match(r"v?(\d+)\.(\d+)", version) if isinstance(version, str) else None
    return match is not None and (int(match[1]), int(match[2])) >= OLDEST
