"""The table of attacks."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process import IN_POD
from tests.chaos.world import World

Play = Callable[[World], Awaitable[None]]
Prepare = Callable[[Path], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One of the table; its docstring says what is done and what has to hold.

    Attributes:
        play: the attack; raises if an assertion failed.
        short: whether CI plays it.
        alone: whether nothing else is played meanwhile: it takes all of the machine.
        root: whether it mounts something.
        cards: of the host.
        config: lines of the agent's config file.
        start: what starts the agent.
        prepare: makes what has to be so before the agent starts, in the directory of all files.
    """

    play: Play
    short: bool = False
    alone: bool = False
    root: bool = False
    cards: str = "warboy=2"
    config: str = ""
    start: tuple[str, ...] = IN_POD
    prepare: Prepare = nullcontext

    @property
    def name(self) -> str:
        """Of the function."""
        return self.play.__name__

    @property
    def what(self) -> str:
        """What is done."""
        return first_paragraph(self.play)


def first_paragraph(function: object) -> str:
    """What a test or an attack does, from its docstring."""
    first, _ = (inspect.getdoc(function) or "").split("\n\n")
    return " ".join(first.split()).rstrip(".")


ATTACKS: list[Attack] = []


def attack(**options: Any) -> Callable[[Play], Play]:
    """Enters a function into the table; the options are those of `Attack`."""

    def enter(play: Play) -> Play:
        ATTACKS.append(Attack(play=play, **options))
        return play

    return enter
