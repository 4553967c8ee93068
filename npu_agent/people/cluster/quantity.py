"""Quantities, as Kubernetes writes amounts: ``8``, ``500m``, ``48Gi``, ``1e3``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache

_BINARY = {f"{letter}i": 2 ** (10 * at) for at, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {letter: 1000**at for at, letter in enumerate("kMGTPE", 1)}
_SMALL = {letter: Fraction(1, 1000**at) for at, letter in enumerate("mun", 1)}
_FACTORS: Mapping[str, Fraction | int] = {"": 1, **_BINARY, **_DECIMAL, **_SMALL}
_FORM = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE])?)",
    re.ASCII,
)
_LONGEST = 64

Amounts = dict[str, Fraction]
"""By the name of a resource or counter."""


@lru_cache(maxsize=2**12)
def quantity(text: str) -> Fraction:
    """The amount; a large cluster writes the same few a hundred thousand times.

    Raises:
        ValueError: it is none.
    """
    found = _FORM.fullmatch(text) if len(text) <= _LONGEST else None
    if not found:
        raise ValueError(f"{text!r} is not a quantity")
    number, exponent, suffix = found.groups()
    return Fraction(number) * Fraction(10) ** int(exponent or 0) * _FACTORS[suffix or ""]


def amounts(texts: Mapping[str, str]) -> Amounts:
    return {name: quantity(text) for name, text in texts.items()}


def total(each: Iterable[Amounts]) -> Amounts:
    found: Amounts = {}
    for one in each:
        for name, amount in one.items():
            found[name] = found.get(name, Fraction()) + amount
    return found


def largest(each: Iterable[Amounts]) -> Amounts:
    """The largest of each name."""
    found: Amounts = {}
    for one in each:
        for name, amount in one.items():
            found[name] = max(found.get(name, amount), amount)
    return found


def number(amount: Fraction) -> str:
    """Formats for people: ``8``, ``0.5``, ``2G``."""
    for suffix, factor in reversed(_BINARY.items()):
        if amount and not amount % factor:
            return f"{amount // factor}{suffix}"
    return str(amount) if amount.denominator == 1 else f"{float(amount):g}"
