"""Differences between two configurations, and which of them apply without a restart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from npu_agent.config.schema import KEYS, Config
from npu_agent.config.text import as_yaml

_SHOWN = 16


@dataclass(frozen=True)
class Change:
    """A key with a new value, as `Config` holds them; as text `interval: 10 -> 5`."""

    key: str
    old: object
    new: object
    needs_restart: bool

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.old)} -> {_short(self.new)}"


def _short(value: object) -> str:
    if isinstance(value, tuple) and len(value) > _SHOWN:
        return f"{as_yaml(value[:_SHOWN])[:-1]}, … and {len(value) - _SHOWN:,} more]"
    return as_yaml(value)


def changes(old: Config, new: Config) -> tuple[tuple[Change, ...], Config]:
    """The keys whose values differ, and `old` with those that apply while running."""
    differences, mixed = [], old
    for key in KEYS:
        before, after = key.value(old), key.value(new)
        if before != after:
            differences.append(Change(key.name, before, after, needs_restart=not key.live))
            mixed = _set(mixed, key.attributes, after) if key.live else mixed
    return tuple(differences), mixed


def _set(values: Any, attributes: tuple[str, ...], value: object) -> Any:
    first, *rest = attributes
    if rest:
        value = _set(getattr(values, first), tuple(rest), value)
    return replace(values, **{first: value})
