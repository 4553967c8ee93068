"""Objects of the API server: what is read of them, and nothing else.

Formats: k8s.io/api of Kubernetes 1.37, core/v1 and resource/v1, types.go. Each type has the shape
of the JSON. Parts that only the scheduler's rules read stay plain values.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

AGENT = "app.kubernetes.io/name=npu-agent"
"""Selects what the agent's manifests label; anyone may label a Pod so: see `DaemonSet.runs`."""

Plain = dict[str, Any]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*\Z")]
"""Of what becomes part of messages."""
RequestName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(/.*)?\Z")]
"""Part of a CDI device's name, and after a slash the alternative that a prioritized list chose."""


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    """Fields as the API names them."""


class ListMeta(_Struct, frozen=True):
    """The metadata of a page of a list."""

    next: str = msgspec.field(default="", name="continue")
    """Asks for the next page; "": there is none."""


class ObjectList(_Struct, Generic[T], frozen=True):
    """A list, or a page of one."""

    metadata: ListMeta = ListMeta()
    items: tuple[T, ...] | None = None


class Owner(_Struct, frozen=True):
    """An object that another one belongs to."""

    kind: str
    uid: str = ""
    controller: bool = False


class Meta(_Struct, frozen=True):
    """An object's metadata; times are RFC 3339."""

    name: str
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[Owner, ...] = ()
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class Object(_Struct, frozen=True):
    """The fields that all objects have."""

    metadata: Meta

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def key(self) -> str:
        """``namespace/name``; the name alone where the object has no namespace."""
        return "/".join(filter(None, (self.namespace, self.name)))


class Condition(_Struct, frozen=True):
    """A condition of a Node or Pod; times are RFC 3339 in whole seconds, or None."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_heartbeat_time: str | None = None
    last_transition_time: str | None = None


def condition(of: tuple[Condition, ...], type_: str) -> Condition | None:
    return next((one for one in of if one.type == type_), None)


class Taint(_Struct, frozen=True):
    """A taint of a Node, or of a device."""

    key: str
    effect: str = ""
    value: str = ""

    @property
    def bars(self) -> bool:
        """Whether it keeps out what does not tolerate it."""
        return self.effect in ("NoSchedule", "NoExecute")


class NodeSpec(_Struct, frozen=True):
    """The desired state of a Node."""

    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeInfo(_Struct, frozen=True):
    """The kubelet's report about itself."""

    kubelet_version: str = ""


class NodeStatus(_Struct, frozen=True):
    """Quantities are as Kubernetes writes them: ``{"example.com/npu": "8"}``."""

    allocatable: dict[str, str] = {}
    capacity: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()
    node_info: NodeInfo = NodeInfo()


class Node(Object, frozen=True):
    """A Node."""

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class ContainerClaim(_Struct, frozen=True):
    """One of the Pod's claims that a container uses; `request`: only that of it."""

    name: str
    request: str = ""


class Resources(_Struct, frozen=True):
    """The resource requests of a container."""

    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    claims: tuple[ContainerClaim, ...] = ()


class Container(_Struct, frozen=True):
    """A container; an init container with restartPolicy Always is a sidecar."""

    name: str
    image: str = ""
    resources: Resources = Resources()
    restart_policy: str = ""


class PodClaim(_Struct, frozen=True):
    """A claim that a Pod refers to, by its name or by a template."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class PodSpec(_Struct, frozen=True):
    """The Node, the containers and the claims of a Pod."""

    node_name: str = ""
    service_account_name: str = ""
    scheduler_name: str = "default-scheduler"
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    resource_claims: tuple[PodClaim, ...] = ()


class PodClaimStatus(_Struct, frozen=True):
    """The claim that was made of a template; None: none was needed."""

    name: str
    resource_claim_name: str | None = None


class ExtendedClaim(_Struct, frozen=True):
    """The claim that the scheduler made for extended resources (KEP-5004)."""

    resource_claim_name: str
    request_mappings: tuple[Plain, ...] = ()


class HealthOf(_Struct, frozen=True, rename={"resource_id": "resourceID"}):
    """A device of a container and its health (KEP-4680)."""

    resource_id: str
    health: str = ""


class Allocated(_Struct, frozen=True):
    """The devices that a container has of a resource; a claim's is ``claim:NAME/REQUEST``."""

    name: str
    resources: tuple[HealthOf, ...] = ()


class ContainerStatus(_Struct, frozen=True):
    """The status of a container."""

    name: str
    allocated_resources_status: tuple[Allocated, ...] = ()


class PodStatus(_Struct, frozen=True):
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
        daemon = any(one.kind == "DaemonSet" for one in self.metadata.owner_references)
        return "a Pod of a DaemonSet" if daemon else ""

    @property
    def claims(self) -> tuple[str, ...]:
        """The names of its ResourceClaims that there are, in its namespace."""
        made = {one.name: one.resource_claim_name for one in self.status.resource_claim_statuses}
        names = [one.resource_claim_name or made.get(one.name) for one in self.spec.resource_claims]
        if extended := self.status.extended_resource_claim_status:
            names.append(extended.resource_claim_name)
        return tuple(filter(None, names))


class PodTemplate(_Struct, frozen=True):
    """The Pods of a controller."""

    spec: PodSpec = PodSpec()


class DaemonSetSpec(_Struct, frozen=True):
    """The desired state of a DaemonSet."""

    template: PodTemplate = PodTemplate()


class DaemonSet(Object, frozen=True):
    """A DaemonSet."""

    spec: DaemonSetSpec = DaemonSetSpec()

    def runs(self, pod: Pod) -> bool:
        """Whether this Pod is one of its own: by owner, namespace and ServiceAccount."""
        return (
            any(one.controller and one.uid == self.uid for one in pod.metadata.owner_references)
            and pod.namespace == self.namespace
            and pod.spec.service_account_name == self.spec.template.spec.service_account_name
        )


class Result(_Struct, frozen=True):
    """A device that a claim was given."""

    request: RequestName
    driver: Name
    pool: Name
    device: Name
    admin_access: bool | None = None
    tolerations: tuple[Plain, ...] = ()

    @property
    def admin(self) -> bool:
        """Whether it is an administrator's, who shares the device with its holder."""
        return bool(self.admin_access)

    def tolerates(self, key: str) -> bool:
        """Whether it was allocated in spite of a taint with this key; "" tolerates each."""
        return any((one.get("key") or key) == key for one in self.tolerations)


class Parameters(_Struct, frozen=True):
    """Opaque parameters for a driver; without requests they are for all."""

    source: str = ""
    requests: tuple[RequestName, ...] = ()
    opaque: Plain = {}

    def __str__(self) -> str:
        several = "s" if len(self.requests) > 1 else ""
        whose = f"the request{several} {', '.join(self.requests)}" if self.requests else "it"
        if self.source == "FromClass":
            return f"FromClass, for {whose}: remove them from spec.config of the DeviceClass"
        return (
            f"FromClaim, for {whose}: remove them from spec.devices.config of the ResourceClaim, "
            "or of its ResourceClaimTemplate"
        )


class Results(_Struct, frozen=True):
    """The devices of an allocation."""

    results: tuple[Result, ...] = ()
    config: tuple[Parameters, ...] = ()


class Allocation(_Struct, frozen=True):
    """The devices allocated to a claim."""

    devices: Results = Results()


class Consumer(_Struct, frozen=True):
    """An object that may use the claim: of a Pod, `resource` is ``pods``."""

    name: Name
    uid: str = ""
    resource: str = ""


class ClaimStatus(_Struct, frozen=True):
    """The state of a claim."""

    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] = ()


class ClaimDevices(_Struct, frozen=True):
    """The requests of a claim."""

    requests: tuple[Plain, ...] = ()


class ClaimSpec(_Struct, frozen=True):
    """The desired state of a claim."""

    devices: ClaimDevices = ClaimDevices()


class ResourceClaim(Object, frozen=True):
    """A ResourceClaim."""

    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()

    @property
    def results(self) -> tuple[Result, ...]:
        """The devices that it was given."""
        return self.status.allocation.devices.results if self.status.allocation else ()

    @property
    def parameters(self) -> tuple[Parameters, ...]:
        """The parameters that it was allocated with."""
        return self.status.allocation.devices.config if self.status.allocation else ()

    @property
    def users(self) -> tuple[str, ...]:
        """The names of the Pods that may use it."""
        return tuple(one.name for one in self.status.reserved_for)

    @property
    def pod_uids(self) -> tuple[str, ...]:
        """Their UIDs."""
        return tuple(one.uid for one in self.status.reserved_for if one.resource == "pods")

    def __str__(self) -> str:
        return f"ResourceClaim {self.key}"


class ClaimTemplateSpec(_Struct, frozen=True):
    """The claim that is made of it."""

    spec: ClaimSpec = ClaimSpec()


class ResourceClaimTemplate(Object, frozen=True):
    """A ResourceClaimTemplate."""

    spec: ClaimTemplateSpec = ClaimTemplateSpec()


class Counters(_Struct, frozen=True):
    """The counters of a set that a device consumes: ``{"core-0": {"value": "1"}}``."""

    counter_set: str
    counters: dict[str, dict[str, str]] = {}


class Device(_Struct, frozen=True):
    """A device of a slice."""

    name: str
    attributes: dict[str, Plain] = {}
    """``{"type": {"string": "card"}}``; one without a domain is the driver's own."""
    capacity: dict[str, Plain] = {}
    consumes_counters: tuple[Counters, ...] = ()
    taints: tuple[Taint, ...] = ()
    allow_multiple_allocations: bool | None = None

    def attribute(self, name: str) -> Any:
        """Its plain value; None: the device has no such attribute."""
        return next(iter(self.attributes.get(name, {}).values()), None)


class Pool(_Struct, frozen=True):
    """The pool of a slice; slices of a lower generation are obsolete."""

    name: str
    generation: int


class SliceSpec(_Struct, frozen=True):
    """The devices of a slice."""

    driver: str
    pool: Pool
    devices: tuple[Device, ...] = ()


class ResourceSlice(Object, frozen=True):
    """A ResourceSlice."""

    spec: SliceSpec


def expressions(of: Plain) -> list[str]:
    """The CEL selectors of a request."""
    return [one["cel"]["expression"] for one in of.get("selectors") or () if "cel" in one]


class ClassSpec(_Struct, frozen=True):
    """Selectors are ``{"cel": {"expression": ...}}``."""

    selectors: tuple[Plain, ...] = ()
    extended_resource_name: str | None = None


class DeviceClass(Object, frozen=True):
    """A DeviceClass."""

    spec: ClassSpec = ClassSpec()

    @property
    def selectors(self) -> list[str]:
        """Its CEL selectors."""
        return expressions({"selectors": self.spec.selectors})


class DeviceSelector(_Struct, frozen=True):
    """Devices by name; a field that is missing holds for all."""

    driver: str | None = None
    pool: str | None = None
    device: str | None = None


class TaintRuleSpec(_Struct, frozen=True):
    """A taint for some devices; without a selector for none."""

    taint: Taint
    device_selector: DeviceSelector | None = None


class DeviceTaintRule(Object, frozen=True):
    """A DeviceTaintRule, by which an administrator taints devices."""

    spec: TaintRuleSpec
