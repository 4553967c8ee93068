"""ResourceClaims of resource.k8s.io/v1, which the driver only reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from npu_agent import typedjson
from npu_agent.core.claim import UID
from npu_agent.kube.client import Api
from npu_agent.kube.objects import Meta, Name, ResourceClaim, Results
from npu_agent.kube.request import Request


class _Meta(Meta, frozen=True, kw_only=True):
    name: Name
    namespace: Name
    uid: Annotated[str, msgspec.Meta(pattern=rf"^{UID}\Z")]


class _ResourceClaim(ResourceClaim, frozen=True):
    metadata: _Meta


def claim_of(answer: Mapping[str, Any], driver: str) -> ResourceClaim:
    """A claim with what is this driver's of its allocation; raises InvalidJsonError.

    Its requests are without the alternative that a prioritized list chose.
    """
    claim = typedjson.convert(answer, _ResourceClaim)
    if (given := claim.status.allocation) is None:
        return claim
    of = given.devices
    ours = Results(
        tuple(
            replace(result, request=result.request.partition("/")[0])
            for result in of.results
            if result.driver == driver
        ),
        tuple(config for config in of.config if config.opaque.get("driver") == driver),
    )
    return replace(claim, status=replace(claim.status, allocation=replace(given, devices=ours)))


async def get(
    api: Api, namespace: str, name: str, *, deadline: float | None = None
) -> dict[str, Any]:
    """A claim as the API server has it; raises ApiError."""
    request = Request("get", "ResourceClaim", dict[str, Any], namespace=namespace, name=name)
    return await api.ask(request, deadline=deadline)


async def served(api: Api) -> bool:
    """Whether the API server serves resource.k8s.io/v1, as Kubernetes does from 1.34 on."""
    return await api.exists(Request("get", "APIResourceList", dict))
