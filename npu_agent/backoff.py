"""Waiting between tries: longer each time, with jitter, never without end."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Backoff:
    """The pauses between tries on this node, in seconds: `first`, doubling up to `longest`, +-20 %.

    For the kubelet, files and sockets. For the API server see `ApiBackoff`.
    """

    first: float
    longest: float
    tries: int = 0

    def next(self) -> float:
        pause = _doubled(self.first, self.tries, self.longest)
        self.tries += 1
        return pause * random.uniform(0.8, 1.2)  # noqa: S311 (spreads load; no secret)

    def reset(self) -> None:
        self.tries = 0


@dataclass(slots=True, kw_only=True)
class ApiBackoff:
    """The pauses between tries of anything that the API server refuses or does not answer.

    Full jitter: each is anything between none and a limit that doubles up to `longest` seconds.
    What keeps one agent waiting keeps those of thousands of nodes waiting, and they must not come
    together.
    """

    first: float = 0.5
    longest: float = 60.0
    tries: int = 0

    def next(self, retry_after: float | None = None) -> float:
        """The seconds before the next try; they come after those that the API server asks for."""
        most = _doubled(self.first, self.tries, self.longest)
        self.tries += 1
        return (retry_after or 0.0) + random.uniform(0.0, most)  # noqa: S311 (as above)

    def reset(self) -> None:
        self.tries = 0


def _doubled(first: float, times: int, longest: float) -> float:
    # The exponent is bounded as a float overflows at 2**1024, a month of tries away.
    return min(longest, first * 2.0 ** min(times, 32))
