"""Evictions: Pods are asked to end by the Eviction API, which heeds PodDisruptionBudgets."""

from __future__ import annotations

from typing import Any

from npu_agent.kube.client import Api
from npu_agent.kube.objects import HolderPod
from npu_agent.kube.request import Request


async def evict(
    api: Api, pod: HolderPod, *, grace_period: int | None = None, as_node: bool = False
) -> None:
    """Asks for the eviction of this very Pod, and of no other one of its name.

    Args:
        api: the API server.
        pod: as it was read.
        grace_period: seconds for its end; None: its own.
        as_node: whether to ask as the agent's Node, which may evict its own Pods alone.

    Raises:
        ApiError: of any kind. TOO_MANY: a PodDisruptionBudget does not allow it now, or the API
            server is overloaded. NOT_FOUND, CONFLICT: the Pod is gone.
    """
    options: dict[str, Any] = {"preconditions": {"uid": pod.uid}}
    if grace_period is not None:
        options["gracePeriodSeconds"] = grace_period
    request = Request(
        verb="create",
        kind="Pod",
        answer=object,
        namespace=pod.namespace,
        name=pod.name,
        subresource="eviction",
        as_node=as_node,
        body={
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": pod.namespace, "name": pod.name},
            "deleteOptions": options,
        },
    )
    await api.ask(request)
