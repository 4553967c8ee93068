"""The objects that are read from a cluster, as far as commands read them.

Formats: k8s.io/api of Kubernetes 1.37, core/v1, apps/v1 and resource/v1, types.go. Quantities are
amounts as Kubernetes writes them: ``8``, ``500m``, ``48Gi``, ``1e3``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

import msgspec

from npu_agent.kube.objects import (
    ApiTaint,
    Condition,
    HolderPod,
    HolderSpec,
    HolderStatus,
    Node,
    Object,
    Plain,
    ResourceClaim,
    ResourceSlice,
    Struct,
)

AGENT = "app.kubernetes.io/part-of=npu-agent,app.kubernetes.io/component=node-agent"
"""Selects what the agent's manifests label, whatever name a release of the chart has; anyone may
label a Pod so: see `DaemonSet.runs`."""

_BINARY = {f"{letter}i": 2 ** (10 * at) for at, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {letter: 1000**at for at, letter in enumerate("kMGTPE", 1)}
_SMALL = {letter: Fraction(1, 1000**at) for at, letter in enumerate("mun", 1)}
_FACTORS: Mapping[str, Fraction | int] = {"": 1, **_BINARY, **_DECIMAL, **_SMALL}
_FORM = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE])?)",
    re.ASCII,
)


class Resources(msgspec.Struct, frozen=True):
    """The resource requests of a container."""

    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class ContainerPort(Struct, frozen=True):
    """A port that a container names."""

    container_port: int
    name: str = ""


class Container(Struct, frozen=True):
    """A container; an init container with restartPolicy Always is a sidecar."""

    name: str
    image: str = ""
    ports: tuple[ContainerPort, ...] = ()
    resources: Resources = Resources()
    restart_policy: str = ""


class SchedulingGate(Struct, frozen=True):
    """The scheduler ignores a Pod until its gates are removed, by who added them."""

    name: str


class PodSpec(HolderSpec, frozen=True):
    """The Node, the containers and the claims of a Pod."""

    service_account_name: str = ""
    scheduler_name: str = "default-scheduler"
    scheduling_gates: tuple[SchedulingGate, ...] = ()
    image_pull_secrets: tuple[Plain, ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()


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


class PodStatus(HolderStatus, frozen=True):
    """The state of a Pod."""

    start_time: str | None = None
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(HolderPod, frozen=True):
    """A Pod."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def agent_container(self) -> Container | None:
        """The agent's own container, as its manifests call it; a mesh may put others before it."""
        containers = {container.name: container for container in self.spec.containers}
        return containers.get("npu-agent")

    @property
    def agent_image(self) -> str:
        return self.agent_container.image if self.agent_container else ""

    @property
    def metrics_port(self) -> int | None:
        """The port of an agent's metrics and report; None: no container names it."""
        ports = self.agent_container.ports if self.agent_container else ()
        return next((port.container_port for port in ports if port.name == "metrics"), None)


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


class ClassSpec(Struct, frozen=True):
    """Selectors are ``{"cel": {"expression": ...}}``."""

    selectors: tuple[Plain, ...] = ()
    extended_resource_name: str | None = None


class DeviceClass(Object, frozen=True):
    """A DeviceClass."""

    spec: ClassSpec = ClassSpec()


class ResourceClaimTemplate(Object, frozen=True):
    """A ResourceClaimTemplate."""


class TaintRuleSpec(Struct, frozen=True):
    """A taint for devices by driver, pool and name, as far as these are given; None: for none."""

    taint: ApiTaint
    device_selector: Plain | None = None


class DeviceTaintRule(Object, frozen=True):
    """A DeviceTaintRule, by which an administrator taints devices."""

    spec: TaintRuleSpec


class Cluster(msgspec.Struct, frozen=True):
    """The objects of a cluster; kinds that may not be read are empty and in `refused`."""

    nodes: tuple[Node, ...] = ()
    pods: tuple[Pod, ...] = ()
    claims: tuple[ResourceClaim, ...] = ()
    templates: tuple[ResourceClaimTemplate, ...] = ()
    slices: tuple[ResourceSlice, ...] = ()
    classes: tuple[DeviceClass, ...] = ()
    taint_rules: tuple[DeviceTaintRule, ...] = ()
    daemon_sets: tuple[DaemonSet, ...] = ()
    """Those with the agent's label."""
    refused: dict[str, str] = {}
    """By kind, ``ResourceSlice``, why it was not read, in a sentence."""
    unread: tuple[str, ...] = ()
    """A sentence on each kind of which objects were left out, as they have a field that is odd."""


def condition(of: tuple[Condition, ...], type_: str) -> Condition | None:
    return next((condition for condition in of if condition.type == type_), None)


def expressions(of: Plain) -> list[str]:
    """The CEL selectors of a request."""
    return [item["cel"]["expression"] for item in of.get("selectors") or () if "cel" in item]


@lru_cache(maxsize=2**12)
def quantity(text: str) -> Fraction:
    """The amount; a large cluster writes the same few a hundred thousand times.

    Raises:
        ValueError: it is none.
    """
    match = _FORM.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a quantity")
    number, exponent, suffix = match.groups()
    return Fraction(number) * Fraction(10) ** int(exponent or 0) * _FACTORS[suffix or ""]
