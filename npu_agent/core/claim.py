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
