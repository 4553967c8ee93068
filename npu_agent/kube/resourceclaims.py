"""ResourceClaims of resource.k8s.io/v1, which the driver only reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from npu_agent import typedjson
from npu_agent.core.claim import UID, Claim, Parameters, Result
from npu_agent.kube.client import Api
from npu_agent.kube.request import Request

_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*\Z")]
"""Of an object, a pool or a device: it is part of messages."""
_Uid = Annotated[str, msgspec.Meta(pattern=rf"^{UID}\Z")]
_Request = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(/.*)?\Z")]
"""A name, part of a CDI device's, and after a slash the alternative that a prioritized list
chose."""


class _Toleration(msgspec.Struct):
    key: str | None = None


class _Result(msgspec.Struct, rename="camel"):
    request: _Request
    driver: _Name
    pool: _Name
    device: _Name
    admin_access: bool | None = None
    tolerations: list[_Toleration] | None = None


class _Opaque(msgspec.Struct):
    driver: str


class _Config(msgspec.Struct):
    source: str = ""
    requests: list[_Request] | None = None
    opaque: _Opaque | None = None


class _Devices(msgspec.Struct):
    results: list[_Result] | None = None
    config: list[_Config] | None = None


class _Allocation(msgspec.Struct):
    devices: _Devices | None = None


class _Consumer(msgspec.Struct):
    name: _Name
    uid: _Uid
    resource: str = ""


class _Status(msgspec.Struct, rename="camel"):
    allocation: _Allocation | None = None
    reserved_for: list[_Consumer] | None = None


class _Metadata(msgspec.Struct):
    namespace: _Name
    name: _Name
    uid: _Uid


class _Classes(msgspec.Struct):
    items: list[dict[str, Any]] | None = None


class _ResourceClaim(msgspec.Struct):
    """Format: ``ResourceClaim`` of k8s.io/api/resource/v1, types.go."""

    metadata: _Metadata
    status: _Status | None = None


def claim_of(answer: Mapping[str, Any], driver: str) -> Claim:
    """A ResourceClaim with this driver's devices; raises InvalidJsonError if it is malformed."""
    found = typedjson.convert(answer, _ResourceClaim)
    status = found.status or _Status()
    devices = (status.allocation and status.allocation.devices) or _Devices()
    consumers = status.reserved_for or ()
    return Claim(
        namespace=found.metadata.namespace,
        name=found.metadata.name,
        uid=found.metadata.uid,
        allocated=status.allocation is not None,
        results=tuple(
            Result(
                request=one.request.partition("/")[0],
                pool=one.pool,
                device=one.device,
                admin=bool(one.admin_access),
                tolerated=frozenset(each.key or "" for each in one.tolerations or ()),
            )
            for one in devices.results or ()
            if one.driver == driver
        ),
        parameters=tuple(
            Parameters(from_class=one.source == "FromClass", requests=tuple(one.requests or ()))
            for one in devices.config or ()
            if one.opaque and one.opaque.driver == driver
        ),
        reserved_for=tuple(one.name for one in consumers),
        pod_uids=tuple(one.uid for one in consumers if one.resource == "pods"),
    )


async def get(
    api: Api, namespace: str, name: str, *, deadline: float | None = None
) -> dict[str, Any]:
    """A claim as the API server has it; raises ApiError."""
    request = Request("get", "ResourceClaim", dict[str, Any], namespace=namespace, name=name)
    return await api.ask(request, deadline=deadline)


async def device_class(api: Api, name: str) -> dict[str, Any]:
    """A DeviceClass; raises ApiError."""
    return await api.ask(Request("get", "DeviceClass", dict[str, Any], name=name))


async def device_classes(api: Api) -> list[dict[str, Any]]:
    return (await api.ask(Request("list", "DeviceClass", _Classes))).items or []


async def served(api: Api) -> bool:
    """Whether the API server serves resource.k8s.io/v1, as Kubernetes does from 1.34 on."""
    return await api.exists(Request("get", "APIResourceList", dict))
