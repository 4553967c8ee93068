"""What left the configuration and the command line, and what replaces it."""

from __future__ import annotations

import re

_GONE = {
    "no-kubelet": "run `npu-agent cdi generate`, again after each change of cards",
    "cdi watch": "run `npu-agent cdi generate`, again after each change of cards",
}
"""By key (`group.key`), option or command. A key stands for its option, too."""


def gone(name: str) -> str:
    """`removed: ...` for a key, an option or a command that left, else ""."""
    remedy = _REMEDIES.get(_bare(name))
    return f"removed: {remedy}" if remedy else ""


def _bare(name: str) -> str:
    return re.sub(r"\[\d+\]|[^a-z0-9]", "", name.lower())


_REMEDIES = {_bare(name): remedy for name, remedy in _GONE.items()}
