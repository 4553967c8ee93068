"""What a look finds: a name, how it stands, what was seen, and how to mend it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """How it stands; only WRONG fails the command."""

    OK = "ok"
    NOTE = "note"
    """Nothing that keeps the agent from working, and people should know."""
    UNUSED = "n/a"
    """The configuration, or this place, has no use for it."""
    UNKNOWN = "unknown"
    """It could not be seen from here, or by this user."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of what `doctor` and `verify` say. The fields' names are those of the JSON."""

    name: str
    """What was looked at: ``plugin directory``, ``card npu0``."""
    state: State
    detail: str
    """What was seen."""
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""

    def as_json(self) -> dict[str, str]:
        """For programs."""
        return {
            "name": self.name,
            "state": self.state.value,
            "detail": self.detail,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Unseen:
    """What a look has instead of what it was to see."""

    why: str
    denied: bool = False
    """Whether this user may not see it; another one may."""

    def check(self, name: str, *, remedy: str = "") -> Check:
        """The line that says so."""
        if self.denied:
            remedy = "run this as root: sudo npu-agent doctor"
        return Check(name, State.UNKNOWN, self.why, remedy)
