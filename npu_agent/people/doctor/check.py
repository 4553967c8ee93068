"""A line of the report: a name, a state, what was found, and the remedy."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Coroutine
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

SUDO = "run this as root: sudo npu-agent doctor"


class State(enum.Enum):
    """The result of a line. Only WRONG fails the command."""

    OK = "ok"
    NOTE = "note"
    """The agent works; people should know."""
    UNUSED = "n/a"
    """The configuration, or this place, has no use for it."""
    UNKNOWN = "unknown"
    """It could not be seen from here, or by this user."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the report of `doctor` and `verify`. Field names are those of the JSON."""

    name: str
    """The subject: ``plugin directory``, ``card npu0``."""
    state: State
    detail: str
    remedy: str = ""
    command: str = ""
    section: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"state": self.state.value}


Lines = AsyncIterator[tuple[str, Check | Coroutine[Any, Any, Check]]]

ok = partial(Check, "", State.OK)
note = partial(Check, "", State.NOTE)
unused = partial(Check, "", State.UNUSED)
unknown = partial(Check, "", State.UNKNOWN)


def wrong(detail: str, remedy: str, command: str) -> Check:
    return Check("", State.WRONG, detail, remedy, command)


class Unknown(Exception):  # noqa: N818 (no error: the line says that it is unknown)
    """Something that a line needs could not be seen."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.check = unknown(why, remedy)
