"""Values as text that the loader reads back."""

from __future__ import annotations

import json
import re

import msgspec

# What every YAML reader takes as text when it stands without quotes.
_WORD = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z/][\w./-]*", re.ASCII | re.IGNORECASE
)

_LONGEST = 60


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
            return value if _WORD.fullmatch(value) else _quoted(value)
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


def shown(text: str) -> str:
    """What a user wrote, for an error message: one short line without control characters."""
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + "…"
    return text if text and text.isprintable() and text == text.strip() else _quoted(text)


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else _escaped(char) for char in quoted)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
