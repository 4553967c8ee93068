"""A problem as a value, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A problem; ``str(trouble)`` is one line with cause and remedy."""

    what: str
    remedy: str = ""
    """"": there is nothing to do."""
    cause: str = ""
    """The words of its source (the kernel, the kubelet, a server)."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.what, self.cause, self.remedy)))
