"""What differs between two configurations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from npu_agent.config.schema import KEYS, Config, Group, Key
from npu_agent.config.text import as_yaml

_SHOWN = 16


@dataclass(frozen=True)
class Change:
    """One key with a new value, both as `Config` holds them; as text `interval: 10 -> 5`."""

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


def changes(old: Config, new: Config) -> tuple[Change, ...]:
    """The keys whose values differ, in the order of the schema."""
    return tuple(
        Change(key.name, key.value(old), key.value(new), needs_restart=not _is_live(key, old, new))
        for key in KEYS
        if key.value(old) != key.value(new)
    )


def in_force(old: Config, new: Config) -> Config:
    """The config in force after `old` was replaced by `new` while the agent runs.

    A key that needs a restart keeps its old value until then.
    """
    mixed = old
    for key in KEYS:
        if _is_live(key, old, new):
            mixed = _set(mixed, key.attributes, key.value(new))
    return mixed


def _is_live(key: Key, old: Config, new: Config) -> bool:
    """Whether a change of this key applies while running.

    A list that needs a restart is live if its items differ in live keys only.
    """
    if key.live:
        return True
    if not isinstance(key.of, Group):
        return False
    fixed = [each.attributes[-1] for each in key.of.keys.values() if not each.live]

    def what(config: Config) -> list[list[object]]:
        items: Any = key.value(config)
        return [[getattr(item, name) for name in fixed] for item in items]

    return what(old) == what(new)


def _set(values: Any, attributes: tuple[str, ...], value: object) -> Any:
    first, *rest = attributes
    if rest:
        value = _set(getattr(values, first), tuple(rest), value)
    return replace(values, **{first: value})
