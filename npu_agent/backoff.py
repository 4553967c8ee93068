"""Waiting between tries: longer each time, with jitter, never for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Backoff:
    """The pauses between tries, in seconds: `first`, doubling up to `longest`, each +-20 %.

    Jitter, so that the agents of many nodes do not retry all at the same time.
    """

    first: float
    longest: float
    tries: int = 0

    def next(self) -> float:
        """The pause before the next try."""
        # The exponent is bounded as a float overflows at 2**1024, a month of tries away.
        pause = min(self.longest, self.first * 2.0 ** min(self.tries, 32))
        self.tries += 1
        return pause * random.uniform(0.8, 1.2)  # noqa: S311 (spreads load; no secret)

    def reset(self) -> None:
        """Starts again at `first`: a try went well."""
        self.tries = 0
