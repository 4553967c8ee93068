"""A ResourceClaim as the driver needs it: what the API server and the kubelet say of it. Pure.

The format is that of ``ResourceClaim`` in resource.k8s.io/v1 (k8s.io/api/resource/v1, types.go).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_UID = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Part of the name of the claim's CDI spec, and of its devices' there."""
_REQUEST = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""As the API server takes one; part of the name of a CDI device too."""


def is_uid(text: str) -> bool:
    """Whether this can be a claim's UID."""
    return _UID.fullmatch(text) is not None


def placeholder_uid(namespace: str, name: str) -> str:
    """In place of the UID of a claim whose UID is not known."""
    return f"{namespace}/{name}"


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
class Parameters:
    """Opaque parameters for our driver in a claim's allocation: our driver takes none."""

    from_class: bool
    """Whether they are those of a DeviceClass, and not of the claim."""
    requests: tuple[str, ...]
    """The requests that they are for; none: all of the claim's."""

    def __str__(self) -> str:
        """For people: where they are, and where to remove them."""
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
    answer = _mapping(answer, "the claim")
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
                    request=_request(one),
                    pool=_text(one, "pool"),
                    device=_text(one, "device"),
                    admin=one.get("adminAccess") is True,
                    tolerated=frozenset(
                        str(_mapping(each, "tolerations").get("key") or "")
                        for each in _list(one.get("tolerations"), "tolerations")
                    ),
                )
            )
    parameters = []
    for each in _list(devices.get("config"), "status.allocation.devices.config"):
        one = _mapping(each, "status.allocation.devices.config")
        if _mapping(one.get("opaque") or {}, "opaque").get("driver") == driver:
            requests = tuple(_word(r, "requests") for r in _list(one.get("requests"), "requests"))
            parameters.append(
                Parameters(from_class=one.get("source") == "FromClass", requests=requests)
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
        parameters=tuple(parameters),
        reserved_for=tuple(_text(each, "name") for each in consumers),
        pod_uids=tuple(_text(each, "uid") for each in consumers if each.get("resource") == "pods"),
    )


def _request(result: Mapping[str, Any]) -> str:
    """The request of a result, without the alternative that was chosen of a prioritized list."""
    base = _text(result, "request").partition("/")[0]
    if not _REQUEST.fullmatch(base):
        raise ValueError("request is not a name of a request")
    return base


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
    return _word(of.get(key), key)


def _word(value: object, what: str) -> str:
    """A text that can be shown, and encoded: JSON can have half a character."""
    if not isinstance(value, str) or not value.isprintable() or not value:
        raise ValueError(f"{what} is missing, or no text")
    return value
