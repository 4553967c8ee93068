"""A ResourceClaim as the driver needs it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

UID = r"[A-Za-z0-9._-]{1,128}"
"""Part of the name of the claim's CDI spec, and of its devices' there."""


def is_uid(text: str) -> bool:
    return re.fullmatch(UID, text) is not None


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
        if not all(self.requests) or not self.requests or any("/" in r for r in self.requests):
            raise ValueError(f"device {self.device!r} is for no request: {self.requests}")
