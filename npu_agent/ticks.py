"""The moments of periodic work on the event loop: the same for all that have the same period.

An idle agent wakes up once for all of them and not once for each.
"""

from __future__ import annotations

import time

_PHASE = 0.25
"""Seconds. Between two probes of the cards, whose threads the loop would delay."""


def until_tick(every: float) -> float:
    """Seconds until the next moment of those that are `every` seconds apart."""
    return every - (time.monotonic() - _PHASE) % every
