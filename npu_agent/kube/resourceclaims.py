"""ResourceClaims of resource.k8s.io/v1, which the driver only reads."""

from __future__ import annotations

from typing import Any

from npu_agent.kube.client import Api, Request, path
from npu_agent.kube.errors import Attempt

_GROUP = path("apis", "resource.k8s.io", "v1")


async def get(
    api: Api, namespace: str, name: str, *, deadline: float | None = None
) -> dict[str, Any]:
    """A claim as the API server has it; `npu_agent.core.claim.claim_of` reads it.

    Up to eight at the same time, and beside all other calls: the kubelet asks for the claims of
    several Pods at the same time, and waits for the answer.

    Args:
        api: the API server.
        namespace: the claim's.
        name: the claim's.
        deadline: seconds that it may take; None: as long as any call.

    Raises:
        ApiError: of any kind; NOT_FOUND if there is no such claim.
    """
    return await api.ask_apart(
        Request(
            attempt=Attempt(
                doing=f"get ResourceClaim {namespace}/{name}", verb="get", resource="resourceclaims"
            ),
            method="GET",
            path=_GROUP + path("namespaces", namespace, "resourceclaims", name),
            kind="ResourceClaim",
        ),
        deadline=deadline,
    )


async def device_class(api: Api, name: str) -> dict[str, Any]:
    """A DeviceClass, which claims name.

    Raises:
        ApiError: of any kind; NOT_FOUND if there is no such class.
    """
    request = Request(
        attempt=Attempt(doing=f"get DeviceClass {name}", verb="get", resource="deviceclasses"),
        method="GET",
        path=_GROUP + path("deviceclasses", name),
        kind="DeviceClass",
    )
    return await api.ask_apart(request)


async def device_classes(api: Api) -> list[dict[str, Any]]:
    """All DeviceClasses.

    Raises:
        ApiError: of any kind.
    """
    request = Request(
        attempt=Attempt(doing="list the DeviceClasses", verb="list", resource="deviceclasses"),
        method="GET",
        path=_GROUP + path("deviceclasses"),
        kind="DeviceClassList",
    )
    return list((await api.ask_apart(request)).get("items") or ())


async def served(api: Api) -> bool:
    """Whether the API server serves resource.k8s.io/v1, as Kubernetes does from 1.34 on.

    Raises:
        ApiError: of any kind but NOT_FOUND.
    """
    return await api.ask_for(
        Request(
            attempt=Attempt(doing="read what resource.k8s.io/v1 has", verb="get", resource=_GROUP),
            method="GET",
            path=_GROUP,
            kind="APIResourceList",
        )
    )
