"""Objects of the API server: what is read of them, and nothing else.

Formats: k8s.io/api of Kubernetes 1.37, core/v1 and resource/v1, types.go. Each type has the shape
of the JSON. Parts that only the scheduler's rules read stay plain values.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Plain = dict[str, Any]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*\Z")]
"""Of what becomes part of messages."""
RequestName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(/.*)?\Z")]
"""Part of a CDI device's name, and after a slash the alternative that a prioritized list chose."""


class Struct(msgspec.Struct, frozen=True, rename="camel"):
    """Fields as the API names them."""


class ObjectVersion(Struct, frozen=True):
    """The metadata of a list, or of an object."""

    resource_version: Annotated[str, msgspec.Meta(min_length=1)]


class Versioned(Struct, frozen=True):
    """An object or list with a version."""

    metadata: ObjectVersion


class OwnerReference(Struct, frozen=True):
    """An object that another one belongs to."""

    kind: str
    uid: str = ""
    controller: bool = False


class Meta(Struct, frozen=True):
    """An object's metadata; times are RFC 3339."""

    name: str
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    deletion_timestamp: str | None = None


class Object(Struct, frozen=True):
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


class Condition(Struct, frozen=True):
    """A condition of a Node or Pod; times are RFC 3339 in whole seconds, or None."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_heartbeat_time: str | None = None
    last_transition_time: str | None = None


class ApiTaint(Struct, frozen=True):
    """A taint of a Node, or of a device."""

    key: str
    effect: str = ""
    value: str = ""

    @property
    def bars(self) -> bool:
        """Whether it keeps out what does not tolerate it."""
        return self.effect in ("NoSchedule", "NoExecute")


class NodeSpec(Struct, frozen=True):
    """The desired state of a Node."""

    unschedulable: bool = False
    taints: tuple[ApiTaint, ...] = ()


class NodeInfo(Struct, frozen=True):
    """The kubelet's report about itself."""

    kubelet_version: str = ""


class NodeStatus(Struct, frozen=True):
    """Quantities are as Kubernetes writes them: ``{"example.com/npu": "8"}``."""

    allocatable: dict[str, str] = {}
    capacity: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()
    node_info: NodeInfo = NodeInfo()


class Node(Object, frozen=True):
    """A Node."""

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Result(Struct, frozen=True):
    """A device that a claim was given."""

    request: RequestName
    driver: Name
    pool: Name
    device: Name
    admin_access: bool | None = None
    """Whether it is an administrator's, who shares the device with its holder."""
    tolerations: tuple[Plain, ...] = ()


class Parameters(Struct, frozen=True):
    """Opaque parameters for a driver."""

    source: str = ""
    """``FromClaim`` or ``FromClass``."""
    opaque: Plain = {}


class Results(Struct, frozen=True):
    """The devices of an allocation."""

    results: tuple[Result, ...] = ()
    config: tuple[Parameters, ...] = ()


class ClaimAllocation(Struct, frozen=True):
    """The devices allocated to a claim."""

    devices: Results = Results()


class Consumer(Struct, frozen=True):
    """An object that may use the claim: of a Pod, `resource` is ``pods``."""

    name: Name
    uid: str = ""
    resource: str = ""


class ClaimStatus(Struct, frozen=True):
    """The state of a claim."""

    allocation: ClaimAllocation | None = None
    reserved_for: tuple[Consumer, ...] = ()


class ClaimDevices(Struct, frozen=True):
    """The requests of a claim."""

    requests: tuple[Plain, ...] = ()


class ClaimSpec(Struct, frozen=True):
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
        return tuple(user.name for user in self.status.reserved_for)

    @property
    def pod_uids(self) -> tuple[str, ...]:
        """Their UIDs."""
        return tuple(user.uid for user in self.status.reserved_for if user.resource == "pods")

    def __str__(self) -> str:
        return f"ResourceClaim {self.key}"


class Counters(Struct, frozen=True):
    """The counters of a set that a device consumes: ``{"core-0": {"value": "1"}}``."""

    counters: dict[str, dict[str, str]] = {}


class SliceDevice(Struct, frozen=True):
    """A device of a slice."""

    name: str
    attributes: dict[str, Plain] = {}
    """``{"type": {"string": "card"}}``; one without a domain is the driver's own."""
    capacity: dict[str, Plain] = {}
    consumes_counters: tuple[Counters, ...] = ()
    taints: tuple[ApiTaint, ...] = ()
    allow_multiple_allocations: bool | None = None

    def attribute(self, name: str) -> Any:
        """Its plain value; None: the device has no such attribute."""
        return next(iter(self.attributes.get(name, {}).values()), None)


class Pool(Struct, frozen=True):
    """The pool of a slice; slices of a lower generation are obsolete."""

    name: str
    generation: int


class SliceSpec(Struct, frozen=True):
    """The devices of a slice."""

    driver: str
    pool: Pool
    devices: tuple[SliceDevice, ...] = ()


class ResourceSlice(Object, frozen=True):
    """A ResourceSlice."""

    spec: SliceSpec


class PodClaim(Struct, frozen=True):
    """A claim that a Pod refers to, by its name or by a template."""

    name: str
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class PodClaimStatus(Struct, frozen=True):
    """The claim that was made of a template; None: none was needed."""

    name: str
    resource_claim_name: str | None = None


class ExtendedClaim(Struct, frozen=True):
    """The claim that the scheduler made for extended resources (KEP-5004)."""

    resource_claim_name: str
    request_mappings: tuple[Plain, ...] = ()


class HolderSpec(Struct, frozen=True):
    """The Node and the claims of a Pod."""

    node_name: str = ""
    resource_claims: tuple[PodClaim, ...] = ()


class HolderStatus(Struct, frozen=True):
    """The phase of a Pod, and the claims that were made for it."""

    phase: str = "Pending"
    resource_claim_statuses: tuple[PodClaimStatus, ...] = ()
    extended_resource_claim_status: ExtendedClaim | None = None


class HolderPod(Object, frozen=True):
    """A Pod, as far as it may hold NPUs."""

    spec: HolderSpec = HolderSpec()
    status: HolderStatus = HolderStatus()

    @property
    def named_claims(self) -> tuple[str, ...]:
        """The names of the ResourceClaims that its spec refers to, and that there are."""
        made = {made.name: made.resource_claim_name for made in self.status.resource_claim_statuses}
        names = (ref.resource_claim_name or made.get(ref.name) for ref in self.spec.resource_claims)
        return tuple(filter(None, names))

    @property
    def claims(self) -> tuple[str, ...]:
        """The names of all its ResourceClaims, in its namespace."""
        extended = self.status.extended_resource_claim_status
        return (*self.named_claims, *([extended.resource_claim_name] if extended else ()))

    @property
    def of_daemon_set(self) -> bool:
        return any(owner.kind == "DaemonSet" for owner in self.metadata.owner_references)

    @property
    def is_static(self) -> bool:
        """Whether it is the mirror of a static Pod: a file of the node."""
        return "kubernetes.io/config.mirror" in self.metadata.annotations

    @property
    def stays(self) -> str:
        """Why it would be back after an eviction; "" if it would not."""
        if self.is_static:
            return "a static Pod of the node"
        return "a Pod of a DaemonSet" if self.of_daemon_set else ""
