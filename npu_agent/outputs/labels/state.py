"""The status of the labels, for the status page, metrics and `npu-agent doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelState:
    """The labels that should be on the Node, and whether they are."""

    output: Literal["api", "nfd", "none"]
    """Where they go: the config's labels.output."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What should be there, by key."""
    in_place: bool = False
    """Whether that was so at the last check."""
    error: str | None = None
    """Why they are not, with the remedy; None while nothing is wrong."""
    applied_at: float | None = None
    """When they were last written; seconds of the wall clock. None: not by this process."""
