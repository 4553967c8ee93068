"""What is wrong with a configuration, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npu_agent.config.schema import Config


@dataclass(frozen=True)
class Place:
    """Where a value was written.

    Attributes:
        source: a file as the user named it, or an option (`--interval`).
        line: counted from 1; None for an option, or for a file as a whole.
        column: counted from 1; None where the line is None.
    """

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, in words for the person who wrote it.

    Attributes:
        place: where.
        key: the dotted key as the file spells it (`resources[0].family`); "" where no key is at
            fault, as with bad YAML.
        message: what is wrong and what would be right.
    """

    place: Place
    key: str = ""
    message: str

    def __str__(self) -> str:
        # An option's name says all that its key would say.
        if self.key and not self.place.source.startswith("--"):
            return f"{self.place}: {self.key}: {self.message}"
        return f"{self.place}: {self.message}"


class ConfigError(Exception):
    """A configuration that is refused, with all that was found wrong.

    Attributes:
        problems: at least one, ordered by line.
        good: a valid configuration of the keys that are not at fault; None if nothing was read.
    """

    def __init__(self, problems: Iterable[Problem], good: Config | None = None) -> None:
        self.good = good
        self.problems = tuple(
            sorted(
                problems, key=lambda problem: (problem.place.line or 0, problem.place.column or 0)
            )
        )
        super().__init__("\n".join(map(str, self.problems)))
