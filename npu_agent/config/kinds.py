"""Kinds of values: how one is read from text, what errors call it, its JSON schema.

Options, errors, JSON schema and the table in docs/ are derived from what a `Kind` holds: a new kind
is one function here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npu_agent.config.text import any_of

if TYPE_CHECKING:
    from npu_agent.config.schema import Key

_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_NUMBER = re.compile(r"[-+]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][-+]?[0-9]{1,3})?")
_LEADING_ZEROS = re.compile(r"([-+]?)0+(?=[0-9])")
_FLAGS = {
    form: word == "true"
    for word in ("true", "false")
    for form in (word, word.title(), word.upper())
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """What a value may be.

    Attributes:
        must: in words, behind "must be".
        placeholder: what stands for it behind an option; "": a part of the key's name.
        json: the JSON schema of the values in a file.
    """

    must: str
    placeholder: str = ""
    json: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Word(Kind):
    """A kind whose values are each one word or text.

    Attributes:
        read: the value that is written so; None if it is not what it must be, and a ValueError
            where there is more to say.
        quoted: whether it may stand in quotes.
        words: all that there are, if these are few.
    """

    read: Callable[[str], object]
    quoted: bool = True
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Items(Kind):
    """A list, which is a tuple in a `Config`."""

    of: Kind


@dataclass(frozen=True, kw_only=True, eq=False)
class Group(Kind):
    """Keys with values of their own.

    Attributes:
        cls: the class whose values have them.
        keys: by the name in this group, without the group's own.
        pattern: for an item of a list: what it is on the command line, each key a named group.
    """

    cls: type[Any]
    keys: Mapping[str, Key]
    pattern: re.Pattern[str] | None

    @property
    def about(self) -> str:
        """The first line of its class's docstring."""
        return (self.cls.__doc__ or "").partition("\n")[0]


def flag() -> Word:
    """True or false; in lower case, upper case or like a title."""
    return Word(
        must="true or false",
        placeholder="{true,false}",
        json={"type": "boolean"},
        read=_FLAGS.get,
        quoted=False,
    )


def number(of: type[int | float], low: float, high: float, unit: str = "") -> Word:
    """A number from `low` to `high`."""
    pattern, in_unit = (_INTEGER if of is int else _NUMBER), f" ({unit})" if unit else ""

    def read(text: str) -> int | float | None:
        if not pattern.fullmatch(text):
            return None
        if _LEADING_ZEROS.match(text):
            better = _LEADING_ZEROS.sub(r"\1", text)
            raise ValueError(f"{text}: some read a leading zero as octal: write {better}")
        value = of(text)
        if not low <= value <= high:
            raise ValueError(f"{text} is out of range: must be {low:g} to {high:g}{in_unit}")
        return value

    name = "integer" if of is int else "number"
    return Word(
        must=("a whole number" if of is int else "a number") + in_unit,
        placeholder=unit.upper() or "N",
        json={"type": name, "minimum": low, "maximum": high},
        read=read,
        quoted=False,
    )


def choice(words: Iterable[str]) -> Word:
    """One of some words."""
    words = tuple(sorted(words))
    # `schema: 0.8` and `schema: 2025` are fine without quotes, and editors see numbers there.
    numbers = [float(word) if "." in word else int(word) for word in words if word[:1].isdigit()]
    return Word(
        must=any_of(words),
        placeholder=f"{{{','.join(words)}}}",
        json={"enum": [*words, *numbers]},
        read=lambda text: text if text in words else None,
        words=words,
    )


def text(must: str, pattern: str, longest: int | None = None) -> Word:
    """A text that the pattern matches; `must` says what that means."""

    def read(text: str) -> str | None:
        # The length first: it bounds what the pattern may cost. All of the text must match:
        # Python's "$" would let a last newline pass.
        short = longest is None or len(text) <= longest
        return text if short and re.fullmatch(pattern, text) else None

    length = {} if longest is None else {"maxLength": longest}
    return Word(must=must, json={"type": "string", **length, "pattern": pattern}, read=read)


def items(of: Kind) -> Items:
    """A list; one of choices names each once."""
    unique = {"uniqueItems": True} if "enum" in of.json else {}
    json = {"type": "array", "items": of.json, **unique}
    return Items(must="a list", placeholder=f"{of.placeholder},...", json=json, of=of)


def group(cls: type[Any], keys: Mapping[str, Key]) -> Group:
    """The keys of a class of `schema`."""
    must, json = f"a group of keys ({', '.join(keys)})", {"$ref": f"#/$defs/{cls.__name__}"}
    placeholder, pattern = getattr(cls, "AS_OPTION", ("", None))
    return Group(must=must, placeholder=placeholder, json=json, cls=cls, keys=keys, pattern=pattern)
