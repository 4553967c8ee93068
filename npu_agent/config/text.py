"""Values as text that the loader reads back, and words for errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from npu_agent.text import closest, quoted_json

# What every YAML reader takes as text when it stands without quotes.
_WORD = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z/][\w./-]*", re.ASCII | re.IGNORECASE
)


def as_yaml(value: object) -> str:
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
    assert is_dataclass(value)  # noqa: S101  (an item of a list; there is nothing else)
    pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
    return f"{{{', '.join(f'{camel(name)}: {as_yaml(v)}' for name, v in pairs if v is not None)}}}"


def camel(name: str) -> str:
    return re.sub("_(ca(?=_)|.)", lambda match: match[1].upper(), name)


def bare(name: str) -> str:
    """A name without case and what joins its words: the same for a key and its option."""
    return re.sub("[^a-z0-9]", "", name.lower())


_CDI = "removed: run `npu-agent cdi generate`, again after each change of cards"
_GONE = {"nokubelet": _CDI, "cdiwatch": _CDI}


def gone(name: str) -> str:
    """`removed: ...` for a key, an option or a command that left, else ""."""
    return _GONE.get(bare(name), "")


def any_of(words: Iterable[str]) -> str:
    """`1, 2, 4 or 8`."""
    return " or ".join(", ".join(words).rsplit(", ", 1))


def did_you_mean(word: str, words: Iterable[str], prefix: str = "") -> str:
    """`: did you mean npu?`, or "" if none of the words is close; the prefix goes before it."""
    close = closest(word, words)
    return f": did you mean {prefix}{close}?" if close else ""
