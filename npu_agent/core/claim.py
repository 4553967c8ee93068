"""A ResourceClaim as the driver needs it: what the API server and the kubelet say of it. Pure.

The format is that of ``ResourceClaim`` in resource.k8s.io/v1 (k8s.io/api/resource/v1, types.go).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A device that the scheduler has allocated to a request of a claim."""

    request: str
    """The request in the claim's spec; without the alternative that a prioritized list chose."""
    pool: str
    device: str
    admin: bool = False
    """Whether it is for an administrator's Pod, beside whoever holds the device."""
    tolerated: frozenset[str] = frozenset()
    """Keys of the taints that the request tolerates; an empty key is every taint."""

    def tolerates(self, key: str) -> bool:
        """Whether the device was allocated in spite of a taint with this key."""
        return key in self.tolerated or "" in self.tolerated


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A ResourceClaim; of its allocation, what is one driver's."""

    namespace: str
    name: str
    uid: str
    allocated: bool
    results: tuple[Result, ...] = ()
    """Of our driver only, in the claim's order."""
    reserved_for: tuple[str, ...] = ()
    """Names of the Pods that may use it."""
    pod_uids: tuple[str, ...] = ()
    """Their UIDs."""

    def __str__(self) -> str:
        """For people."""
        return f"ResourceClaim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRef:
    """A claim as the kubelet names it when it has one prepared or unprepared."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        """For people."""
        return f"ResourceClaim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedResult:
    """A device of a prepared claim, as the kubelet is answered.

    Raises:
        ValueError: `requests` is empty, which to the kubelet means all of the claim's requests, so
            that every container that names any of them would be given the device; or one of them
            has its alternative's name, by which no container asks.
    """

    requests: tuple[str, ...]
    """The requests in the claim's spec that it was allocated to, as `Result.request`."""
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    """Names of the CDI devices that a container is given: ``example.com/claim=…``."""

    def __post_init__(self) -> None:
        if not all(self.requests) or not self.requests or any("/" in one for one in self.requests):
            raise ValueError(f"device {self.device!r} is for no request: {self.requests}")


@dataclass(frozen=True, slots=True, order=True)
class ClaimUse:
    """A device of a claim that a container uses, in the kubelet's words.

    A kubelet 1.36 shows a container that names one request of a claim with all devices of the
    claim, and so each container that has extended resources by DRA with all those of its Pod.
    """

    namespace: str
    pod: str
    container: str
    claim_namespace: str
    claim_name: str
    driver: str
    """Anybody's: a node can have several. It is "", as are pool and device, where a claim is not
    prepared yet."""
    pool: str
    device: str


def claim_of(answer: Mapping[str, Any], driver: str) -> Claim:
    """A ResourceClaim as the API server answers it.

    Raises:
        ValueError: it lacks something, or has it in another form; the message says what.
    """
    meta = _mapping(answer.get("metadata"), "metadata")
    status = _mapping(answer.get("status") or {}, "status")
    allocation = status.get("allocation")
    devices = _mapping(
        _mapping(allocation or {}, "status.allocation").get("devices") or {},
        "status.allocation.devices",
    )
    results = []
    for each in _list(devices.get("results"), "status.allocation.devices.results"):
        one = _mapping(each, "status.allocation.devices.results")
        if one.get("driver") == driver:
            results.append(
                Result(
                    request=_text(one, "request").partition("/")[0],
                    pool=_text(one, "pool"),
                    device=_text(one, "device"),
                    admin=one.get("adminAccess") is True,
                    tolerated=frozenset(
                        str(_mapping(each, "tolerations").get("key") or "")
                        for each in _list(one.get("tolerations"), "tolerations")
                    ),
                )
            )
    consumers = [
        _mapping(each, "status.reservedFor")
        for each in _list(status.get("reservedFor"), "status.reservedFor")
    ]
    return Claim(
        namespace=_text(meta, "namespace"),
        name=_text(meta, "name"),
        uid=_text(meta, "uid"),
        allocated=allocation is not None,
        results=tuple(results),
        reserved_for=tuple(_text(each, "name") for each in consumers),
        pod_uids=tuple(_text(each, "uid") for each in consumers if each.get("resource") == "pods"),
    )


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is no object")  # noqa: TRY004 (one error for whatever is wrong)
    return value


def _list(value: object, what: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{what} is no list")  # noqa: TRY004
    return value


def _text(of: Mapping[str, Any], key: str) -> str:
    value = of.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} is missing, or no text")
    return value
