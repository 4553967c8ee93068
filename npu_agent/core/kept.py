"""Results that are kept for as long as somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_ROUNDS = 4
"""How often all that is kept may be asked for without one, before that one is forgotten."""
_FEW = 32
"""Results that are no reason to forget any."""


def kept(function: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Keeps what a function returned, by its arguments, as `functools.lru_cache` does.

    But for the size, which nobody has to choose: it is for functions that are called for each card
    or device of the node, again and again. However many there are, all are kept, and those of cards
    that have left are forgotten when there are new ones.
    """
    results: dict[tuple[*Ts], list[T]] = {}
    asked: set[int] = set()
    """The `id` of each result that was asked for since others were forgotten."""
    calls, due = 0, _ROUNDS * _FEW

    @wraps(function)
    def ask(*key: *Ts) -> T:
        nonlocal calls, due
        calls += 1
        if (result := results.get(key)) is None:
            if calls > due:
                for one in [one for one, result in results.items() if id(result) not in asked]:
                    del results[one]
                asked.clear()
                calls, due = 0, _ROUNDS * max(len(results), _FEW)
            result = results[key] = [function(*key)]
        asked.add(id(result))
        return result[0]

    return ask
