"""The configuration for people (`config show`) and its schema for editors (`config schema`)."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import inspect as mi

from npu_agent.config.schema import KEYS, Config, plain, schema_of
from npu_agent.config.text import as_yaml

if TYPE_CHECKING:
    from npu_agent.config.load import Effective
    from npu_agent.core.vocabulary import Vocabulary


def show(effective: Effective) -> str:
    """The configuration as a file of the same meaning, with each value's origin as a comment."""
    lines: list[tuple[str, str]] = []
    group = ""
    for key in KEYS:
        if key.group != group:
            group = key.group
            if group:
                lines.append((f"{group}:", ""))
        value, origin = key.of(effective.config), effective.origins[key.name]
        name = "  " * bool(group) + key.name.rpartition(".")[2] + ":"
        if isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            lines += [(name, origin), *((f"  - {as_yaml(item)}", "") for item in value)]
        else:
            lines.append((f"{name} {as_yaml(value)}", origin))
    width = max(len(text) for text, origin in lines if origin)
    return "".join(
        f"{text:{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines
    )


def json_schema(words: Vocabulary) -> dict[str, Any]:
    """The JSON schema (2020-12) of the configuration file."""
    schema = msgspec.json.schema(Config)
    groups = schema["$defs"]
    for group in groups.values():
        group["description"] = group["description"].partition("\n")[0]
    whole = schema_of(words)
    _complete(groups, whole.root)
    for name, default in whole.defaults.items():
        group, _, key = name.rpartition(".")
        if group:
            groups["Config"]["properties"][group]["default"][key] = default
    # `schema: 0.8` and `schema: 2025` are fine without quotes, and editors see numbers there.
    versions = groups["MetricsConfig"]["properties"]["schema"]["enum"]
    versions += [json.loads(text) for text in versions if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text)]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _complete(groups: dict[str, Any], kind: mi.Type) -> None:
    """Adds what `schema_of` added to the types: texts, choices and defaults."""
    if isinstance(kind, mi.VarTupleType):
        kind = kind.item_type
    if not isinstance(kind, mi.StructType):
        return
    properties = groups[kind.cls.__name__]["properties"]
    for field in kind.fields:
        shape, (type_, notes) = properties[field.encode_name], plain(field.type)
        if "description" in notes:
            shape["description"] = notes["description"]
        if isinstance(field.default, str | tuple):
            shape["default"] = field.default
        for at, one in ((shape, type_), (shape.get("items"), getattr(type_, "item_type", None))):
            if isinstance(one, mi.LiteralType) and "anyOf" not in at:
                at.pop("type", None)
                at["enum"] = sorted(map(str, one.values))
        _complete(groups, type_)
