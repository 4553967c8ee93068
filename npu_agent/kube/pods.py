"""Pods, for people's commands: the agent's own pages by the API server's proxy, and evictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npu_agent.kube.client import Api
from npu_agent.kube.errors import ApiError, Kind
from npu_agent.kube.objects import Pod
from npu_agent.kube.request import Request

_PAGE = 5.0
"""Seconds for a page: the proxy itself would wait 30 for a Node that is gone."""


async def evict(api: Api, pod: Pod, grace_period: int | None) -> ApiError | None:
    """Asks for the eviction of this very Pod; None: it was granted, or the Pod is gone.

    Returns:
        Why it was not: a PodDisruptionBudget, or a server that has too much to do.

    Raises:
        ApiError: of any other kind.
    """
    options: dict[str, Any] = {"preconditions": {"uid": pod.metadata.uid}}
    if grace_period is not None:
        options["gracePeriodSeconds"] = grace_period
    namespace, name = pod.metadata.namespace, pod.metadata.name
    meta = {"namespace": namespace, "name": name}
    request = Request("create", "Pod", object, namespace=namespace, name=name)
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
    body["deleteOptions"] = options
    try:
        await api.ask(replace(request, subresource="eviction", body=body))
    except ApiError as error:
        if error.kind in (Kind.NOT_FOUND, Kind.CONFLICT):  # another Pod has its name by now
            return None
        if error.kind is Kind.TOO_MANY:
            return error
        raise
    return None


async def page_of(api: Api, namespace: str, name: str) -> dict[str, Any]:
    """/status.json of an agent's Pod, by the API server's proxy.

    The proxy takes the first port of a Pod, which is that of the pages.
    """
    page = Request("get", "Pod", dict[str, Any], namespace=namespace)
    failed: list[ApiError] = []
    for scheme in ("", "https:"):
        request = replace(page, name=f"{scheme}{name}:", subresource="proxy/status.json")
        try:
            return await api.ask(request, deadline=_PAGE)
        except ApiError as error:
            failed.append(error)
            if error.kind in (Kind.FORBIDDEN, Kind.TIMEOUT):
                break
    if any(error.kind is Kind.UNAUTHORIZED for error in failed):
        raise ApiError(
            f"the agent's page of Pod {namespace}/{name} wants a token (401), which the API "
            "server's proxy does not pass on",
            f"run `kubectl -n {namespace} port-forward {name} 9100`, and get /status.json with "
            "your token",
            kind=Kind.UNAUTHORIZED,
        )
    raise failed[0]
