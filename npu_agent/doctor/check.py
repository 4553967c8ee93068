"""One line of the report: a name, a verdict, what was found, and the remedy."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Coroutine
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from npu_agent.core.trouble import TroubleKind

CONFIGURATION = "Configuration and this process"
"""The heading of the lines on them."""
SUDO = "run this as root: sudo npu-agent doctor"
DRIVER_LOG = "dmesg | tail -n 50"
KUBELET = "systemctl status kubelet"


class Verdict(enum.Enum):
    """What a line comes to. Only WRONG fails the command."""

    OK = "ok"
    NOTE = "note"
    """The agent works; people should know."""
    UNUSED = "n/a"
    """The configuration, or this place, has no use for it."""
    UNKNOWN = "unknown"
    """It could not be seen from here, or by this user."""
    WRONG = "wrong"


class Finding(NamedTuple):
    """A line without its name."""

    state: Verdict
    detail: str
    """What was found."""
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""
    command: str = ""
    """What to type for it, or to see more of it; empty where there is no command."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report of `doctor` and `verify`. The fields' names are those of the JSON."""

    name: str
    """The subject: ``plugin directory``, ``card npu0``."""
    state: Verdict
    detail: str
    remedy: str = ""
    command: str = ""
    section: str = ""
    """The heading that it stands under: ``Kubelet``."""
    follows: str = ""
    """The line that it is a consequence of; empty: it stands for itself."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"state": self.state.value}


Lines = AsyncIterator[tuple[str, Finding | Coroutine[Any, Any, Finding]]]
"""The lines of a subject: the name of each, and what it comes to."""

ok = partial(Finding, Verdict.OK)
note = partial(Finding, Verdict.NOTE)
unused = partial(Finding, Verdict.UNUSED)
unknown = partial(Finding, Verdict.UNKNOWN)


def wrong(detail: str, remedy: str, command: str) -> Finding:
    """What has to be fixed: what was found, how to fix it, and the first thing to type for it."""
    return Finding(Verdict.WRONG, detail, remedy, command)


class Unseen(Exception):  # noqa: N818 (no error: the line says that it is unknown)
    """Something that a line needs could not be seen."""

    def __init__(self, why: str, kind: TroubleKind = TroubleKind.OTHER) -> None:
        super().__init__(why)
        self.why = why
        self.kind = kind

    @property
    def finding(self) -> Finding:
        """The line for it."""
        return unknown(self.why, SUDO if self.kind is TroubleKind.DENIED else "")
