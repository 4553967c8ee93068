"""`npu-agent config`: check, show or describe the configuration."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import MISSING, is_dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from npu_agent import config
from npu_agent.config.kinds import ValueKind
from npu_agent.config.load import refusals
from npu_agent.config.schema import Group, schema_of
from npu_agent.config.text import as_yaml
from npu_agent.config.values import MAX_BYTES
from npu_agent.vendors import SPEC


def main(args: argparse.Namespace) -> int:
    match args.action:
        case "check":
            loaded = _read(args.file).config
            print(f"{args.file}: good")
            for note in notes(loaded):
                print(f"note: {note}")
        case "show":
            print(show(config.from_args(args, SPEC)), end="")
        case "schema":
            print(json.dumps(json_schema(), indent=2))
    return 0


def _read(file: Path) -> config.Effective:
    """What is in a file, or what another command prints: ``-``, ``/dev/stdin``, ``<(command)``."""
    with refusals(file), sys.stdin.buffer if file == Path("-") else file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    return config.parse(data, str(file), SPEC)


def notes(checked: config.Config) -> Iterator[str]:
    """Yields what is valid, and takes more than this file or has an unlikely effect."""
    if checked.health.evict:
        yield (
            "health.evict takes the components impersonation and eviction (Helm: rbac.mode: "
            "impersonation, eviction: true); without them it reaches only Pods that name a "
            "ResourceClaim"
        )
    host, _ = checked.metrics.address
    if host and ip_address(host).is_loopback:
        listen = checked.metrics.listen
        yield f"metrics.listen is {listen}: no Prometheus outside the Pod reaches it"


def show(effective: config.Effective) -> str:
    """The configuration as a file of the same meaning, with each value's origin as a comment."""
    lines: list[tuple[str, str]] = []
    groups: list[str] = []
    for key in config.KEYS:
        *here, last = key.name.split(".")
        for depth, group in enumerate(here):
            if here[: depth + 1] != groups[: depth + 1]:
                lines.append((f"{'  ' * depth}{group}:", ""))
        groups = here
        value = key.value(effective.config)
        origin = effective.origins[key.name]
        name = f"{'  ' * len(here)}{last}:"
        if isinstance(value, tuple) and value and is_dataclass(value[0]):
            lines += [(name, origin), *((f"  - {as_yaml(item)}", "") for item in value)]
        else:
            lines.append((f"{name} {as_yaml(value)}", origin))
    width = max(len(text) for text, origin in lines if origin)
    return "".join(
        f"{text:{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines
    )


def json_schema() -> dict[str, Any]:
    root = schema_of(SPEC)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_or_null(_json(root)),
        "$defs": _definitions(root),
    }


def _json(of: ValueKind | Group) -> dict[str, Any]:
    return dict(of.json) if isinstance(of, ValueKind) else {"$ref": f"#/$defs/{of.cls.__name__}"}


def _definitions(group: Group) -> dict[str, Any]:
    name = group.cls.__name__
    definitions: dict[str, Any] = {
        name: {
            "title": name,
            "description": group.about,
            "type": "object",
            "properties": {name: _property(key) for name, key in group.keys.items()},
            "required": [name for name, key in group.keys.items() if key.default is MISSING],
            "additionalProperties": False,
        }
    }
    for key in group.keys.values():
        if isinstance(key.of, Group):
            definitions |= _definitions(key.of)
    return definitions


def _defaults(key: config.Key) -> object:
    if isinstance(key.of, Group) and not key.many:
        return {name: _defaults(inner) for name, inner in key.of.keys.items()}
    return key.default


def _or_null(kind: dict[str, Any]) -> dict[str, Any]:
    """A file, a group or a list is null while all of its lines are commented out."""
    return {"anyOf": [kind, {"type": "null"}]}


def _property(key: config.Key) -> dict[str, Any]:
    kind = _json(key.of)
    if key.many:
        unique = {"uniqueItems": True} if "enum" in kind else {}
        kind = {"type": "array", "items": kind, **unique}
    if key.optional or key.many or isinstance(key.of, Group):
        kind = _or_null(kind)
    if key.description:
        kind = {"description": key.description, **kind}
    return kind if key.default is MISSING else {**kind, "default": _defaults(key)}
