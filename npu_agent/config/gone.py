"""What left the configuration and the command line, and what replaces it."""

from __future__ import annotations

from npu_agent.config.text import bare

_CDI = "removed: run `npu-agent cdi generate`, again after each change of cards"
_GONE = {"nokubelet": _CDI, "cdiwatch": _CDI}
"""By the bare name of a key, an option or a command."""


def gone(name: str) -> str:
    """`removed: ...` for a key, an option or a command that left, else ""."""
    return _GONE.get(bare(name), "")
