"""New inputs made of known ones: bytes that are changed anywhere, and JSON that stays JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

REGISTRY = (
    b"",
    b"\0",
    b"\n",
    b"\x1b[2J",
    b"\xff\xfe",
    b"\xed\xa0\x80",  # half a surrogate pair
    "\u2028\u202e\u00a0\u0663\u00b2".encode(),  # line and direction, spaces and digits of others
    b"0",
    b"-1",
    b"1e999",
    b"nan",
    b"Infinity",
    b"18446744073709551616",
    b"9" * 5000,
    b"0x",
    b":" * 300,
    b"[" * 3000,
    b'{"a":' * 2000,
    b"../../x",
    b"null",
    b"&a [*a]",
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
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        chance.choice(_CHANGES)(chance, found, corpus)
    return bytes(found[:LARGEST])


def smaller(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """As little of an input as still fails: pieces are left out, ever smaller ones."""
    piece = len(data) // 2
    while piece:
        at = 0
        while at < len(data):
            less = data[:at] + data[at + piece :]
            if fails(less):
                data = less
            else:
                at += piece
        piece //= 2
    return data


def _place(chance: Random, data: bytearray) -> slice:
    at = chance.randrange(len(data) + 1)
    return slice(at, at + chance.choice((0, 1, 1, 2, 4, 16, 64)))


def _flip(chance: Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _byte(chance: Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _cut(chance: Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[_place(chance, data)]


def _end(chance: Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[chance.randrange(len(data) + 1) :]


def _word(chance: Random, data: bytearray, _: Sequence[bytes]) -> None:
    data[_place(chance, data)] = chance.choice(REGISTRY)


def _again(chance: Random, data: bytearray, _: Sequence[bytes]) -> None:
    piece = data[_place(chance, data)]
    at = chance.randrange(len(data) + 1)
    data[at:at] = piece * chance.choice((1, 2, 40))


def _other(chance: Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    other = bytearray(chance.choice(corpus))
    data[_place(chance, data)] = other[_place(chance, other).start :]


_CHANGES = (_flip, _flip, _byte, _cut, _end, _word, _word, _again, _other)


def _json(chance: Random, data: bytes) -> bytes | None:
    """JSON of which one value is another one; None if that is no JSON with something in it."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return None
    places: list[tuple[Any, Any]] = []
    _collect(tree, places)
    if not places:
        return None
    within, key = chance.choice(places)
    if chance.random() < 0.2:
        del within[key]
    else:
        other = chance.choice(places)
        within[key] = chance.choice(
            (*VALUES, other[0].get(other[1]) if isinstance(other[0], dict) else 0)
        )
    try:
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):  # it is part of itself now
        return None


def _collect(tree: Any, places: list[tuple[Any, Any]]) -> None:
    """Adds each place in the tree: what it is in, and its key or number there."""
    inner = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in inner:
        places.append((tree, key))
        _collect(value, places)
