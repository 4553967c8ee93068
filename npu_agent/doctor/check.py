"""One line of the report: a name, a state, what was found, and the remedy."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from npu_agent.core.trouble import TroubleKind

P = ParamSpec("P")
T = TypeVar("T")

SUDO = "run this as root: sudo npu-agent doctor"


class State(enum.Enum):
    """Only WRONG fails the command."""

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
    """One line of the report of `doctor` and `verify`. The fields' names are those of the JSON."""

    name: str
    """The subject: ``plugin directory``, ``card npu0``."""
    state: State
    detail: str
    """What was found."""
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"state": self.state.value}


class Finding(NamedTuple):
    """A line without its name."""

    state: State
    detail: str
    remedy: str = ""


ok = partial(Finding, State.OK)
note = partial(Finding, State.NOTE)
unused = partial(Finding, State.UNUSED)
unknown = partial(Finding, State.UNKNOWN)
wrong = partial(Finding, State.WRONG)


class Unseen(Exception):  # noqa: N818 (most of the time a value)
    """In place of a value that a probe could not read; raised by the checks that need it."""

    def __init__(self, why: str, kind: TroubleKind = TroubleKind.OTHER) -> None:
        super().__init__(why)
        self.why = why
        self.kind = kind

    @property
    def finding(self) -> Finding:
        """The line for it."""
        return unknown(self.why, SUDO if self.kind is TroubleKind.DENIED else "")


def have(value: T | Unseen) -> T:
    """The value that a check needs; raises it if it is Unseen."""
    if isinstance(value, Unseen):
        raise value
    return value


def line(name: str, judge: Callable[P, Finding], *args: P.args, **kwargs: P.kwargs) -> Check:
    """The line of this name: what `judge` finds, or that something it needs is Unseen."""
    try:
        found = judge(*args, **kwargs)
    except Unseen as unseen:
        found = unseen.finding
    return Check(name, *found)
