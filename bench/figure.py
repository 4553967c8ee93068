"""A line of the table, and how it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    measured: str
    target: str = ""
    """From spec section 10."""
    peers: str = ""
    """Best to worst of what users run today, measured elsewhere (docs/benchmarks.md)."""

    def __str__(self) -> str:
        return f"| {self.what:58} | {self.target:12} | {self.peers:24} | {self.measured:18} |"


HEADER = "\n".join(
    (
        str(Figure("figure", "measured", "target", "peers today")),
        f"|{'-' * 60}|{'-' * 14}|{'-' * 26}|{'-' * 20}|",
    )
)


def quantiles(seconds: Sequence[float]) -> str:
    """``p50 / p99`` in ms."""
    cuts = statistics.quantiles((1000 * one for one in seconds), n=100)
    return f"{cuts[49]:.2f} / {cuts[98]:.2f} ms"
