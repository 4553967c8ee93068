"""Waiting between tries: at random, longer each time, never without end."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Backoff:
    """The pauses between tries, in seconds, with full jitter.

    Each is anything between `least` and a limit: `first`, doubled with each try up to `longest`.
    What keeps one agent waiting keeps those of thousands of nodes waiting, and they must not come
    together. `least` is for what must not be tried again immediately.

    With `even`, each pause after the first one that could be `longest` is `longest`: from then on
    the tries of many agents are evenly spread over that time, whenever what they wait for is back.
    """

    first: float = 0.5
    longest: float = 60.0
    least: float = 0.0
    even: bool = False
    tries: int = 0

    def next(self, retry_after: float | None = None) -> float:
        """The seconds before the next try; they come after those that the API server asks for."""
        # The exponent is bounded as a float overflows at 2**1024, a month of tries away.
        limit = self.first * 2.0 ** min(self.tries, 32)
        most = max(self.least, min(self.longest, limit))
        least = most if self.even and limit >= 2 * self.longest else self.least
        self.tries += 1
        return (retry_after or 0.0) + random.uniform(least, most)  # noqa: S311 (no secret)

    def reset(self) -> None:
        self.tries = 0


def spread(seconds: float) -> float:
    """A period, +-20 %: so that the agents of thousands of nodes do not act at the same moment."""
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311 (no secret)
