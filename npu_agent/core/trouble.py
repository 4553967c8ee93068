"""A problem as a value: code decides on its kind, people read its sentences."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TroubleKind(enum.Enum):
    """Kinds of trouble on which some code decides."""

    DENIED = "denied"
    """Not for this user; another one may."""
    MISSING = "missing"
    """There is no such file, directory, host or process."""
    REFUSED = "refused"
    """No process takes connections there."""
    TIMEOUT = "timeout"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A problem; ``str(trouble)`` is one line with cause and remedy."""

    what: str
    remedy: str = ""
    """"": there is nothing to do."""
    kind: TroubleKind = TroubleKind.OTHER
    cause: str = ""
    """The words of its source (the kernel, the kubelet, a server)."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.what, self.cause, self.remedy)))


def kind_of(error: BaseException) -> TroubleKind:
    """The kind of an error of the operating system or of a connection."""
    match error:
        case PermissionError():  # EACCES and EPERM
            return TroubleKind.DENIED
        case FileNotFoundError() | NotADirectoryError() | ProcessLookupError():
            return TroubleKind.MISSING
        case ConnectionRefusedError():
            return TroubleKind.REFUSED
        case TimeoutError():
            return TroubleKind.TIMEOUT
    return TroubleKind.OTHER
