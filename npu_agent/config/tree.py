"""What somebody wrote, before it means anything: a tree in which every value knows its place.

Files and command-line options both become such a tree, and the loader knows no other input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from npu_agent.config.errors import Place


@dataclass(frozen=True)
class Scalar:
    """One value. `plain` is False if it was quoted or is a block of text."""

    place: Place
    text: str
    plain: bool = True

    @property
    def null(self) -> bool:
        """Whether this is YAML's way to write nothing."""
        return self.plain and self.text in {"", "~", "null", "Null", "NULL"}


@dataclass(frozen=True)
class List:
    """A list of values."""

    place: Place
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Map:
    """Keys and values in the order of the text; a key may be there twice."""

    place: Place
    entries: tuple[tuple[Scalar, Node], ...]


Node: TypeAlias = Scalar | List | Map
