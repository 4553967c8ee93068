"""New inputs made of known ones: bytes that are changed anywhere, and JSON that stays JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

WORDS = (
    *(b"", b"\0", b"\n", b"\x1b[2J", b"\xff\xfe", b"\xed\xa0\x80"),  # the last: half a surrogate
    "\u2028\u202e\u00a0\u0663\u00b2".encode(),  # line and direction, spaces and digits of others
    *(b"0", b"-1", b"1e999", b"nan", b"Infinity", b"18446744073709551616", b"9" * 5000, b"0x"),
    *(b":" * 300, b"[" * 3000, b'{"a":' * 2000, b"../../x", b"null", b"&a [*a]"),
    b"!!python/object:os.system",
)
"""What parsers often do not expect."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1 << 64, 10**400, 1.5, float("inf"), float("nan")),
    *("", "a", "\0", "\x1b[2J", "\ud800", "\u202e", "../../x", "npu/0", "a:b:c", "x" * 5000),
    *([], {}, [[]], [None], [0], ["a"], {"a": None}, {"": {}}),
)
"""What stands in an object where something else should."""
LARGEST = 1 << 16
"""Bytes of an input."""


def mutated(chance: Random, corpus: Sequence[bytes]) -> bytes:
    """An input that one of the corpus has become by a few changes."""
    data = chance.choice(corpus)
    if chance.random() < 0.7 and (changed := _json(chance, data)) is not None:
        return changed[:LARGEST]
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at = chance.randrange(len(data) + 1)
        end = at + chance.choice((0, 1, 1, 2, 4, 16, 64))
        other = chance.choice(corpus)
        new = chance.choice(
            (
                chance.randbytes(1),
                b"",
                chance.choice(WORDS),
                data[at:end] * chance.choice((2, 40)),
                other[chance.randrange(len(other) + 1) :],
            )
        )
        data = data[:at] + new + (data[end:] if chance.random() < 0.9 else b"")
    return data[:LARGEST]


def _json(chance: Random, data: bytes) -> bytes | None:
    """JSON of which one value is another one; None if that is no JSON with something in it."""
    places: list[tuple[Any, Any]] = []

    def collect(tree: Any) -> None:
        keys = tree if isinstance(tree, dict) else range(len(tree) if isinstance(tree, list) else 0)
        for key in keys:
            places.append((tree, key))
            collect(tree[key])

    try:
        tree = json.loads(data)
        collect(tree)
        if not places:
            return None
        within, key = chance.choice(places)
        if chance.random() < 0.2:
            del within[key]
        else:
            there, name = chance.choice(places)
            within[key] = chance.choice((*VALUES, there[name]))
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):  # no JSON, or part of itself now
        return None
