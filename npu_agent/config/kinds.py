"""Kinds of values: how one is read from text, what errors call it, its JSON schema.

Options, errors, JSON schema and the table in docs/ are derived from what a `ValueKind` holds: a new
kind is one function here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from npu_agent.config.text import any_of

# Without leading zeros, which some readers take for octal.
_WHOLE = "(0|[1-9][0-9]{0,17})"
_INTEGER = re.compile(f"[-+]?{_WHOLE}")
_NUMBER = re.compile(rf"[-+]?({_WHOLE}(\.[0-9]{{0,18}})?|\.[0-9]{{1,18}})([eE][-+]?[0-9]{{1,3}})?")
_FLAGS = {
    form: word == "true"
    for word in ("true", "false")
    for form in (word, word.title(), word.upper())
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueKind:
    """The allowed values of a key."""

    must: str
    """In words, behind "must be"."""
    placeholder: str = ""
    """What stands for it behind an option; "": a part of the key's name."""
    json: Mapping[str, Any]
    """The JSON schema of the values in a file."""
    read: Callable[[str], object]
    """The value of a text; None if it is not allowed."""
    words: tuple[str, ...] = ()
    """All allowed words, if they are few."""


def flag() -> ValueKind:
    """True or false; in lower case, upper case or like a title."""
    return ValueKind(
        must="true or false",
        placeholder="{true,false}",
        json={"type": "boolean"},
        read=_FLAGS.get,
    )


def number(of: type[int | float], low: float, high: float, unit: str = "") -> ValueKind:
    pattern, name = (_INTEGER, "integer") if of is int else (_NUMBER, "number")

    def read(text: str) -> int | float | None:
        value = of(text) if pattern.fullmatch(text) else None
        return value if value is not None and low <= value <= high else None

    what = "a whole number" if of is int else "a number"
    return ValueKind(
        must=f"{what}{f' ({unit})' if unit else ''}, {low:g} to {high:g}",
        placeholder=unit.upper() or "N",
        json={"type": name, "minimum": low, "maximum": high},
        read=read,
    )


def choice(words: Iterable[str]) -> ValueKind:
    words = tuple(sorted(words))
    # `schema: 0.8` and `schema: 2025` are fine without quotes, and editors see numbers there.
    numbers = [float(word) if "." in word else int(word) for word in words if word[:1].isdigit()]
    return ValueKind(
        must=any_of(words),
        placeholder=f"{{{','.join(words)}}}",
        json={"enum": [*words, *numbers]},
        read=lambda text: text if text in words else None,
        words=words,
    )


def text(must: str, pattern: str, longest: int | None = None) -> ValueKind:
    """A text that the pattern matches; `must` says what that means."""

    def read(text: str) -> str | None:
        # The length first: it bounds what the pattern may cost. All of the text must match:
        # Python's "$" would let a last newline pass.
        short = longest is None or len(text) <= longest
        return text if short and re.fullmatch(pattern, text) else None

    length = {} if longest is None else {"maxLength": longest}
    return ValueKind(must=must, json={"type": "string", **length, "pattern": pattern}, read=read)
