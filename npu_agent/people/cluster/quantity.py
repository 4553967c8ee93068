"""Quantities, as Kubernetes writes amounts: ``8``, ``500m``, ``48Gi``, ``1e3``."""

from __future__ import annotations

import re
from collections.abc import Mapping
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


@lru_cache(maxsize=2**12)
def quantity(text: str) -> Fraction:
    """The amount; a large cluster writes the same few a hundred thousand times.

    Raises:
        ValueError: it is none.
    """
    match = _FORM.fullmatch(text) if len(text) <= _LONGEST else None
    if not match:
        raise ValueError(f"{text!r} is not a quantity")
    number, exponent, suffix = match.groups()
    return Fraction(number) * Fraction(10) ** int(exponent or 0) * _FACTORS[suffix or ""]
