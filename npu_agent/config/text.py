"""Values as text that the loader reads back."""

from __future__ import annotations

import re

import msgspec

from npu_agent.text import quoted_json

# What every YAML reader takes as text when it stands without quotes.
_WORD = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z/][\w./-]*", re.ASCII | re.IGNORECASE
)


def as_yaml(value: object) -> str:
    """A value of the configuration in one line of YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value).removesuffix(".0")
        case str():
            return value if _WORD.fullmatch(value) else quoted_json(value)
        case tuple():
            return f"[{', '.join(map(as_yaml, value))}]"
        case msgspec.Struct():
            pairs = (
                f"{field.encode_name}: {as_yaml(getattr(value, field.name))}"
                for field in msgspec.structs.fields(value)
                if getattr(value, field.name) is not None
            )
            return f"{{{', '.join(pairs)}}}"
    raise AssertionError(value)
