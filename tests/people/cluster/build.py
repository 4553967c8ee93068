"""Objects of a cluster, short to write: what a test is about is what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from npu_agent.people.cluster.fetch import KINDS
from npu_agent.people.cluster.objects import Cluster
from npu_agent.people.cluster.rows import Words
from npu_agent.typedjson import convert

DRIVER = "npu.furiosa.ai"
NPU = "beta.furiosa.ai/npu"
SPACE = "ml"
AGENT = {
    "app.kubernetes.io/name": "npu-blue",  # a release's own, by nameOverride
    "app.kubernetes.io/part-of": "npu-agent",
    "app.kubernetes.io/component": "node-agent",
}
READY = {"conditions": [{"type": kind, "status": "True"} for kind in ("Initialized", "Ready")]}
WORDS = Words(driver=DRIVER, domain="furiosa.ai", cores={"rngd": 8, "warboy": 2})
Json = dict[str, Any]
T = TypeVar("T")

TYPES: Mapping[str, tuple[str, Any]] = {
    type_.__name__: (field, type_) for field, type_ in KINDS.items()
}


def read(type_: type[T], value: Json) -> T:
    """The object of plain values."""
    return convert(value, type_)


def cluster(*objects: Json) -> Cluster:
    found: dict[str, list[Any]] = {field: [] for field, _ in TYPES.values()}
    for one in objects:
        field, type_ = TYPES[one["kind"]]
        found[field].append(read(type_, one))
    fields: dict[str, Any] = {field: tuple(each) for field, each in found.items()}
    return Cluster(**fields)


def thing(kind: str, name: str, namespace: str = "", **fields: Any) -> Json:
    meta: Json = {"name": name, "uid": f"uid-{name}"}
    if namespace:
        meta["namespace"] = namespace
    meta |= fields.pop("metadata", {})
    return {"kind": kind, "metadata": meta, **fields}


def node(name: str, allocatable: Mapping[str, str] | None = None, **fields: Any) -> Json:
    there = {"cpu": "8", "memory": "32Gi", "pods": "110", **(allocatable or {})}
    status = {"allocatable": there, "capacity": there, **fields.pop("status", {})}
    labels = {"kubernetes.io/hostname": name, **fields.pop("labels", {})}
    return thing(
        "Node",
        name,
        metadata={"labels": labels, **fields.pop("metadata", {})},
        status=status,
        **fields,
    )


def pod(
    name: str = "train", requests: Mapping[str, str] | None = None, *, on: str = "", **spec: Any
) -> Json:
    container = {
        "name": "main",
        "image": "localhost/pause:1",
        "resources": {"requests": requests or {}, "limits": requests or {}},
    }
    fields: Json = {"containers": [container], **spec}
    status: Json = {"phase": "Pending"}
    if on:
        fields["nodeName"] = on
        status = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
    status |= fields.pop("status", {})
    metadata = fields.pop("metadata", {})
    return thing("Pod", name, SPACE, metadata=metadata, spec=fields, status=status)


DAEMON_SET = thing(
    "DaemonSet",
    "npu-agent",
    "kube-system",
    metadata={"labels": AGENT},
    spec={"template": {"spec": {"serviceAccountName": "npu-agent"}}},
)


def agent(name: str, on: str) -> Json:
    """A Pod of the agent's DaemonSet."""
    # A mesh puts its own container before the agent's.
    mesh = {"name": "proxy", "image": "mesh:2.0", "ports": [{"containerPort": 15090}]}
    ports = [{"name": "probes", "containerPort": 9101}, {"name": "metrics", "containerPort": 9100}]
    image = [mesh, {"name": "npu-agent", "image": "reg:5000/npu-agent:1.0", "ports": ports}]
    owner = {"kind": "DaemonSet", "uid": "uid-npu-agent", "controller": True}
    meta = {"namespace": "kube-system", "labels": AGENT, "ownerReferences": [owner]}
    account = "npu-agent"
    return pod(
        name, on=on, containers=image, serviceAccountName=account, status=READY, metadata=meta
    )


def claims(**named: str) -> list[Json]:
    return [{"name": key, "resourceClaimName": value} for key, value in named.items()]


def class_(name: str = DRIVER, *selectors: str, extended: str = "") -> Json:
    expressions = selectors or (f'device.driver == "{DRIVER}"',)
    spec: Json = {"selectors": [{"cel": {"expression": one}} for one in expressions]}
    if extended:
        spec["extendedResourceName"] = extended
    return thing("DeviceClass", name, spec=spec)


def request(name: str = "npu", *selectors: str, **fields: Any) -> Json:
    exactly: Json = {"deviceClassName": DRIVER, **fields}
    if selectors:
        exactly["selectors"] = [{"cel": {"expression": one}} for one in selectors]
    return {"name": name, "exactly": exactly}


def claim(name: str, *requests: Json, **status: Any) -> Json:
    devices: Json = {"requests": list(requests or [request()])}
    return thing("ResourceClaim", name, SPACE, spec={"devices": devices}, status=status)


def held(name: str, node_: str, *devices: str, by: str = "") -> Json:
    """A claim that was given these devices."""
    results = [
        {"request": "npu", "driver": DRIVER, "pool": node_, "device": one} for one in devices
    ]
    users = [{"resource": "pods", "name": by, "uid": f"uid-{by}"}] if by else []
    allocation = {"devices": {"results": results}}
    return claim(name, request(count=len(devices)), allocation=allocation, reservedFor=users)


def device(
    name: str, cores: int = 8, index: int | None = None, arch: str = "rngd", **fields: Any
) -> Json:
    attributes = {"cores": {"int": cores}, "type": {"string": "card" if cores == 8 else "cores"}}
    if index is not None:
        attributes |= {"index": {"int": index}, "arch": {"string": arch}}
    return {"name": name, "attributes": attributes, **fields}


def slice_(node_: str, *devices: Json, driver: str = DRIVER) -> Json:
    pool = {"name": node_, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node_, "pool": pool, "devices": list(devices)}
    return thing("ResourceSlice", f"{driver}-{node_}", spec=spec)


def cut(node_: str, *cards: str) -> list[Json]:
    """Cards of eight cores in all widths."""
    devices = []
    for index, card in enumerate(cards):
        for width in (8, 4, 2, 1):
            for first in range(0, 8, width):
                taken = {f"core-{n}": {"value": "1"} for n in range(first, first + width)}
                name = card if width == 8 else f"{card}-cores-{first}-{first + width - 1}"
                consumes = [{"counterSet": card, "counters": taken}]
                devices.append(device(name, width, index, consumesCounters=consumes))
    return [slice_(node_, *devices)]
