"""Errors of a configuration, with their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npu_agent.config.schema import Config

_MOST = 20


@dataclass(frozen=True)
class Place:
    """The place of a value: a file as the user named it, or an option (`--interval`)."""

    source: str
    line: int | None = None
    """Counted from 1; None for an option, or for a file as a whole."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An error in a configuration, for the person who wrote it."""

    place: Place
    key: str = ""
    """The dotted key as the file spells it (`resources[0].family`); "" for bad YAML."""
    message: str

    def __str__(self) -> str:
        # An option's name says all that its key would say.
        if self.key and not self.place.source.startswith("--"):
            return f"{self.place}: {self.key}: {self.message}"
        return f"{self.place}: {self.message}"


class ConfigError(Exception):
    """A configuration that is refused: the first 20 problems, by line.

    `good` has the keys that are not at fault; None if nothing was read.
    """

    def __init__(self, problems: Iterable[Problem], good: Config | None = None) -> None:
        self.good = good
        self.problems = tuple(sorted(problems, key=lambda problem: problem.place.line or 0)[:_MOST])
        super().__init__("\n".join(map(str, self.problems)))

    @classmethod
    def at(cls, place: Place, message: str) -> ConfigError:
        """An error of one problem that does not belong to a key."""
        return cls([Problem(place=place, message=message)])
