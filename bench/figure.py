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

    def __str__(self) -> str:
        return f"| {self.what:64} | {self.target:21} | {self.measured:33} |"


HEADER = "\n".join(
    (
        str(Figure("figure", "measured", "target")),
        f"|{'-' * 66}|{'-' * 23}|{'-' * 35}|",
    )
)


def median(seconds: Sequence[float]) -> float:
    """p50 in ms."""
    return 1000 * statistics.median(seconds)


def quantiles(seconds: Sequence[float]) -> str:
    """``p50 / p99`` in ms."""
    cuts = statistics.quantiles((1000 * one for one in seconds), n=100)
    return f"{cuts[49]:.2f} / {cuts[98]:.2f} ms"
