"""ResourceClaims of resource.k8s.io/v1, which the driver only reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from npu_agent import typedjson
from npu_agent.core.claim import UID, Claim, Parameters, Result
from npu_agent.kube.client import Api
from npu_agent.kube.objects import Meta, Name, ResourceClaim
from npu_agent.kube.request import Request


class _Meta(Meta, frozen=True, kw_only=True):
    name: Name
    namespace: Name
    uid: Annotated[str, msgspec.Meta(pattern=rf"^{UID}\Z")]


class _ResourceClaim(ResourceClaim, frozen=True):
    metadata: _Meta


class _Classes(msgspec.Struct):
    items: list[dict[str, Any]] | None = None


def claim_of(answer: Mapping[str, Any], driver: str) -> Claim:
    """A ResourceClaim with this driver's devices; raises InvalidJsonError if it is malformed."""
    found = typedjson.convert(answer, _ResourceClaim)
    allocation, consumers = found.status.allocation, found.status.reserved_for
    return Claim(
        namespace=found.metadata.namespace,
        name=found.metadata.name,
        uid=found.metadata.uid,
        allocated=allocation is not None,
        results=tuple(
            Result(
                request=one.request.partition("/")[0],
                pool=one.pool,
                device=one.device,
                admin=bool(one.admin_access),
                tolerated=frozenset(each.get("key") or "" for each in one.tolerations),
            )
            for one in found.results
            if one.driver == driver
        ),
        parameters=tuple(
            Parameters(from_class=one.source == "FromClass", requests=one.requests)
            for one in (allocation.devices.config if allocation else ())
            if one.opaque.get("driver") == driver
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
