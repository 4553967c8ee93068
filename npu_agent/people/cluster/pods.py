"""Pods: what commands read of them, the agents' own pages by the API server's proxy, evictions.

Format: k8s.io/api of Kubernetes 1.37, core/v1 and apps/v1, types.go.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from npu_agent.kube.client import Api
from npu_agent.kube.errors import ApiError, ErrorKind
from npu_agent.kube.objects import Condition, Object, Plain, Struct
from npu_agent.kube.request import Request

AGENT = "app.kubernetes.io/name=npu-agent"
"""Selects what the agent's manifests label; anyone may label a Pod so: see `DaemonSet.runs`."""

_PAGE = 5.0
"""Seconds for a page: the proxy itself would wait 30 for a Node that is gone."""


class ContainerClaim(Struct, frozen=True):
    """One of the Pod's claims that a container uses; `request`: only that of it."""

    name: str
    request: str = ""


class Resources(msgspec.Struct, frozen=True):
    """The resource requests of a container."""

    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    claims: tuple[ContainerClaim, ...] = ()


class Container(Struct, frozen=True):
    """A container; an init container with restartPolicy Always is a sidecar."""

    name: str
    image: str = ""
    resources: Resources = Resources()
    restart_policy: str = ""


class PodClaim(Struct, frozen=True):
    """A claim that a Pod refers to, by its name or by a template."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class PodSpec(Struct, frozen=True):
    """The Node, the containers and the claims of a Pod."""

    node_name: str = ""
    service_account_name: str = ""
    scheduler_name: str = "default-scheduler"
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    resource_claims: tuple[PodClaim, ...] = ()


class PodClaimStatus(Struct, frozen=True):
    """The claim that was made of a template; None: none was needed."""

    name: str
    resource_claim_name: str | None = None


class ExtendedClaim(Struct, frozen=True):
    """The claim that the scheduler made for extended resources (KEP-5004)."""

    resource_claim_name: str
    request_mappings: tuple[Plain, ...] = ()


class HealthOf(Struct, frozen=True, rename={"resource_id": "resourceID"}):
    """A device of a container and its health (KEP-4680)."""

    resource_id: str
    health: str = ""


class Allocated(Struct, frozen=True):
    """The devices that a container has of a resource; a claim's is ``claim:NAME/REQUEST``."""

    name: str
    resources: tuple[HealthOf, ...] = ()


class ContainerStatus(Struct, frozen=True):
    """The status of a container."""

    name: str
    allocated_resources_status: tuple[Allocated, ...] = ()


class PodStatus(Struct, frozen=True):
    """The state of a Pod."""

    phase: str = "Pending"
    start_time: str | None = None
    conditions: tuple[Condition, ...] = ()
    resource_claim_statuses: tuple[PodClaimStatus, ...] = ()
    extended_resource_claim_status: ExtendedClaim | None = None
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Object, frozen=True):
    """A Pod."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def ended(self) -> bool:
        """Whether it holds nothing any more."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def stays(self) -> str:
        """Why it would be back after an eviction; "" if it would not."""
        if "kubernetes.io/config.mirror" in self.metadata.annotations:
            return "a static Pod of the node"
        daemon = any(owner.kind == "DaemonSet" for owner in self.metadata.owner_references)
        return "a Pod of a DaemonSet" if daemon else ""

    @property
    def claims(self) -> tuple[str, ...]:
        """The names of its ResourceClaims that there are, in its namespace."""
        made = {made.name: made.resource_claim_name for made in self.status.resource_claim_statuses}
        names = [ref.resource_claim_name or made.get(ref.name) for ref in self.spec.resource_claims]
        if extended := self.status.extended_resource_claim_status:
            names.append(extended.resource_claim_name)
        return tuple(filter(None, names))


class PodTemplate(Struct, frozen=True):
    """The Pods of a controller."""

    spec: PodSpec = PodSpec()


class DaemonSetSpec(Struct, frozen=True):
    """The desired state of a DaemonSet."""

    template: PodTemplate = PodTemplate()


class DaemonSet(Object, frozen=True):
    """A DaemonSet."""

    spec: DaemonSetSpec = DaemonSetSpec()

    def runs(self, pod: Pod) -> bool:
        """Whether this Pod is one of its own: by owner, namespace and ServiceAccount."""
        return (
            any(ref.controller and ref.uid == self.uid for ref in pod.metadata.owner_references)
            and pod.namespace == self.namespace
            and pod.spec.service_account_name == self.spec.template.spec.service_account_name
        )


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
        if error.kind in (
            ErrorKind.NOT_FOUND,
            ErrorKind.CONFLICT,
        ):  # another Pod has its name by now
            return None
        if error.kind is ErrorKind.TOO_MANY:
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
            if error.kind in (ErrorKind.FORBIDDEN, ErrorKind.TIMEOUT):
                break
    if any(error.kind is ErrorKind.UNAUTHORIZED for error in failed):
        raise ApiError(
            f"the agent's page of Pod {namespace}/{name} wants a token (401), which the API "
            "server's proxy does not pass on",
            f"run `kubectl -n {namespace} port-forward {name} 9100`, and get /status.json with "
            "your token",
            kind=ErrorKind.UNAUTHORIZED,
        )
    raise failed[0]
