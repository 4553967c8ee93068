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
