"""The configuration for people (`config show`) and its schema for editors (`config schema`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from npu_agent.config.schema import KEYS, Config
from npu_agent.config.text import as_yaml

if TYPE_CHECKING:
    from npu_agent.config.load import Effective


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


def json_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of the configuration file."""
    schema = msgspec.json.schema(Config)
    # `schema: 0.8` and `schema: 2025` are fine without quotes, and editors see numbers there.
    versions = schema["$defs"]["MetricsConfig"]["properties"]["schema"]["enum"]
    versions += [0.8, 2025]
    for group in schema["$defs"].values():
        group["description"] = group["description"].partition("\n")[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
