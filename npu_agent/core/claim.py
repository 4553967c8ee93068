"""A ResourceClaim as the driver needs it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

UID = r"[A-Za-z0-9._-]{1,128}"
"""Part of the name of the claim's CDI spec, and of its devices' there."""


def is_uid(text: str) -> bool:
    return re.fullmatch(UID, text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A device that the scheduler has allocated to a request of a claim."""

    request: str
    """In the claim's spec, without the alternative that a prioritized list chose."""
    pool: str
    device: str
    admin: bool = False
    """Whether it is an administrator's, who shares the device with its holder."""
    tolerated: frozenset[str] = frozenset()
    """Keys of the taints that the request tolerates; an empty key is every taint."""

    def tolerates(self, key: str) -> bool:
        """Whether it was allocated in spite of a taint with this key."""
        return key in self.tolerated or "" in self.tolerated


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Opaque parameters in a claim's allocation: our driver takes none."""

    from_class: bool
    requests: tuple[str, ...]
    """Those they are for; none: all of the claim's."""

    def __str__(self) -> str:
        several = "s" if len(self.requests) > 1 else ""
        whose = f"the request{several} {', '.join(self.requests)}" if self.requests else "it"
        if self.from_class:
            return f"FromClass, for {whose}: remove them from spec.config of the DeviceClass"
        return (
            f"FromClaim, for {whose}: remove them from spec.devices.config of the ResourceClaim, "
            "or of its ResourceClaimTemplate"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A ResourceClaim; of its allocation, what is one driver's."""

    namespace: str
    name: str
    uid: str
    allocated: bool
    results: tuple[Result, ...] = ()
    """Of our driver only, in the claim's order."""
    parameters: tuple[Parameters, ...] = ()
    reserved_for: tuple[str, ...] = ()
    """Names of the Pods that may use it."""
    pod_uids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"ResourceClaim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRef:
    """A claim as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"ResourceClaim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedResult:
    """A device of a prepared claim, as the kubelet is answered.

    Raises:
        ValueError: `requests` is empty, which to the kubelet means all of the claim's requests, or
            one has its alternative's name, by which no container asks.
    """

    requests: tuple[str, ...]
    """As `Result.request`."""
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    """``example.com/claim=…``: what a container is given."""

    def __post_init__(self) -> None:
        if not all(self.requests) or not self.requests or any("/" in one for one in self.requests):
            raise ValueError(f"device {self.device!r} is for no request: {self.requests}")


@dataclass(frozen=True, slots=True, order=True)
class ClaimUse:
    """A device of a claim that a container uses, in the kubelet's words.

    A kubelet 1.36 shows a container that names one request of a claim with all devices of the
    claim, and with extended resources by DRA, with all those of its Pod.
    """

    namespace: str
    pod: str
    container: str
    claim_namespace: str
    claim_name: str
    driver: str
    """Of any vendor; "", as are pool and device, while the claim is not prepared."""
    pool: str
    device: str
