"""Container Device Interface: the device nodes of each device under a name that the runtime knows.

With `allocation.method: cdi` the kubelet passes names on, such as ``example.com/npu=<device ID>``,
and the container runtime finds the nodes in a spec file
(cncf-tags/container-device-interface, SPEC.md).
Nodes only: the environment of several devices has to be joined, which a spec cannot. A claim is
known as a whole before its containers start, so that its spec has both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from npu_agent.core.grant import Grant
from npu_agent.core.offer import Device

DIRECTORY = "var/run/cdi"
"""Below the host's root: where container runtimes expect specs that change while they run."""
_VERSION = "0.5.0"
"""The oldest version that knows all we use: `hostPath`, and names that begin with a digit."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


def specs(devices: Iterable[Device]) -> dict[str, bytes]:
    """The spec files for these devices by their names in `DIRECTORY`: one for each vendor's kind.

    Devices whose ID is no name for CDI, or that have no nodes, are left out: one of them would
    make the runtime refuse the whole file.
    """
    found: dict[str, list[dict[str, object]]] = {}
    for device in sorted({d.id: d for d in devices}.values(), key=lambda d: d.order):
        if device.nodes and _NAME.fullmatch(device.id):
            found.setdefault(device.card.access.cdi_kind, []).append(_entry(device))
    return {
        f"{kind.replace('/', '-')}.json": _spec(kind, entries) for kind, entries in found.items()
    }


def claim_file(kind: str, uid: str) -> str:
    """The name in `DIRECTORY` of the spec file of a claim."""
    return f"{kind.replace('/', '-')}-{uid}.json"


def claim_name(kind: str, uid: str, request: str) -> str:
    """The CDI name of what a container gets that asks for this request of a claim."""
    return f"{kind}={uid}-{request}"


def claim_spec(kind: str, uid: str, grants: Mapping[str, Grant]) -> bytes:
    """The spec file of a claim: a CDI device for each request, with all that it grants."""
    entries: list[dict[str, object]] = [
        {
            "name": f"{uid}-{request}",
            "containerEdits": {
                "env": [f"{name}={value}" for name, value in grant.environment],
                "deviceNodes": _nodes(grant.nodes),
            },
        }
        for request, grant in sorted(grants.items())
    ]
    return _spec(kind, entries)


def _spec(kind: str, entries: list[dict[str, object]]) -> bytes:
    # Without line breaks: those are the slow encoder's, and a Pod waits for it.
    text = json.dumps({"cdiVersion": _VERSION, "kind": kind, "devices": entries})
    return text.encode() + b"\n"


def _entry(device: Device) -> dict[str, object]:
    return {"name": device.id, "containerEdits": {"deviceNodes": _nodes(device.nodes)}}


def _nodes(nodes: Iterable[str]) -> list[dict[str, str]]:
    return [
        {"path": f"/dev/{node}", "hostPath": f"/dev/{node}", "permissions": "rw"} for node in nodes
    ]
