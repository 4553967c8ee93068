"""A request to the API server, and how its answer is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

T = TypeVar("T")

LARGEST_OBJECT = 2 * 2**20
"""Bytes: etcd takes no object of more than 1.5 MiB."""
METADATA = "PartialObjectMetadata"
_DRA = "/apis/resource.k8s.io/v1"
_PLACES = {
    "Node": ("/api/v1", "nodes"),
    "Event": ("/api/v1", "events"),
    "Pod": ("/api/v1", "pods"),
    "APIVersions": ("", "api"),
    "APIResourceList": ("/apis/resource.k8s.io", "v1"),
    "PriorityClass": ("/apis/scheduling.k8s.io/v1", "priorityclasses"),
    "DaemonSet": ("/apis/apps/v1", "daemonsets"),
    "ResourceClaim": (_DRA, "resourceclaims"),
    "ResourceSlice": (_DRA, "resourceslices"),
    "ResourceClaimTemplate": (_DRA, "resourceclaimtemplates"),
    "DeviceClass": (_DRA, "deviceclasses"),
    "DeviceTaintRule": (_DRA, "devicetaintrules"),
    "TokenReview": ("/apis/authentication.k8s.io/v1", "tokenreviews"),
    "SubjectAccessReview": ("/apis/authorization.k8s.io/v1", "subjectaccessreviews"),
    "SelfSubjectAccessReview": ("/apis/authorization.k8s.io/v1", "selfsubjectaccessreviews"),
}
"""By kind: the API group's path, and RBAC's word."""
OF_NODES = ("nodes", "resourceclaims", "resourceslices")
"""What the Node authorizer knows to be a node's or another's; RBAC's words."""
READS = ("get", "list", "watch")
AS_NODE = "impersonate-on:associated-node:"
"""Before a verb: the right to do it as the own Node (KEP-5284)."""


def plural(kind: str) -> str:
    """The kind for people: ``Nodes``, ``DeviceClasses``."""
    return f"{kind}{'es' if kind.endswith('s') else 's'}"


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """A request for one object, which is the answer."""

    verb: str
    """``get``, ``list``, ``watch``, ``create``, ``delete``; ``apply``: server-side; ``patch``: a
    merge patch."""
    kind: str
    answer: type[T]
    """Read by `npu_agent.typedjson`; of a watch, the object of each event."""
    _: KW_ONLY
    name: str = ""
    namespace: str = ""
    subresource: str = ""
    """``status``, ``log``, ``eviction``, ``proxy/status.json``: as it stands in the path."""
    manager: str = ""
    """Who owns what is applied; "": `FIELD_MANAGER`."""
    metadata_only: bool = False
    as_node: bool = False
    """Whether only the Node may do it: by constrained impersonation, or not at all."""
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    largest: int = LARGEST_OBJECT
    """Bytes of the answer."""

    @property
    def path(self) -> str:
        group, resource = _PLACES[self.kind]
        names = ("namespaces", self.namespace) if self.namespace else ()
        parts = (*names, resource, *filter(None, [self.name]))
        path = group + "".join(f"/{quote(part, safe='')}" for part in parts)
        return "/".join(filter(None, (path, self.subresource)))

    @property
    def resource(self) -> str:
        """RBAC's word for what is asked: ``nodes``, ``nodes/status``."""
        kind = self.subresource.partition("/")[0]
        return "/".join(filter(None, (_PLACES[self.kind][1], kind)))

    @property
    def reads_of_node(self) -> bool:
        """Whether it reads what the Node authorizer knows to be a node's or another's."""
        return self.verb in READS and _PLACES[self.kind][1] in OF_NODES

    @property
    def answers(self) -> str:
        """The kind of object that answers it; "": another server, or a container's log."""
        # Other kinds that we delete are answered with the object.
        if self.subresource == "eviction" or (self.verb, self.kind) == ("delete", "PriorityClass"):
            return "Status"
        if self.subresource.startswith("proxy") or self.subresource == "log":
            return ""
        if self.metadata_only:
            return METADATA
        return f"{self.kind}List" if self.verb == "list" else self.kind

    def __str__(self) -> str:
        """Returns words for people: ``get Node n1``, ``list ResourceSlices``."""
        if self.verb in ("list", "watch"):
            return f"{self.verb} {plural(self.kind)}"
        name = "/".join(filter(None, (self.namespace, self.name)))
        of = f"the {self.subresource} of " if self.subresource else ""
        return f"{self.verb} {of}{self.kind} {name}".rstrip()
