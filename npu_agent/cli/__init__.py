"""The command line: `main` finds the command, `catalogue` and `parser` parse it.

`run` is here; every other command is a module of `npu_agent.people.commands`, imported when it
runs, and its help and options are in the `catalogue` there. What a command cannot do is a
`CommandError`, which `main` prints: so all errors have one style.
"""

import sys
from pathlib import Path

FAILED = 1
"""Exit code of a command that was understood and could not be done, or found something wrong."""
WRONG = 2
"""Exit code of wrong use or a wrong configuration."""


class CommandError(Exception):
    """A command failed; the message has place, cause and remedy for people."""

    def __init__(self, words: str, code: int = FAILED) -> None:
        super().__init__(words)
        self.code = code


def program() -> str:
    """Returns the command as typed: ``npu-agent``, or ``kubectl npu`` for kubectl's plugin."""
    return "kubectl npu" if Path(sys.argv[0]).name.startswith("kubectl") else "npu-agent"
