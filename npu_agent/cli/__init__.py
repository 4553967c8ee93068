"""The command line: `main` finds the command, `catalogue` and `parser` parse it.

`run` is here; every other command is a module of `npu_agent.people.commands`, imported when it
runs, and its help and options are in the `catalogue` there. What a command cannot do is a
`CommandError`, which `main` prints: so all errors have one style.
"""

import argparse
import os
import stat
import sys
from pathlib import Path

from npu_agent.text import reason

FAILED = 1
"""Exit code of a command that was understood and could not be done, or found something wrong."""
WRONG = 2
"""Exit code of wrong use or a wrong configuration."""
ROOT_VARIABLE = "NPU_AGENT_HOST_ROOT"
"""The environment variable for the default of --host-root."""


class CommandError(Exception):
    """A command failed; the message has place, cause and remedy for people."""

    def __init__(self, words: str, code: int = FAILED) -> None:
        super().__init__(words)
        self.code = code


def program() -> str:
    """Returns the command as typed: ``npu-agent``, or ``kubectl npu`` for kubectl's plugin."""
    return "kubectl npu" if Path(sys.argv[0]).name.startswith("kubectl") else "npu-agent"


def host_root(args: argparse.Namespace) -> Path:
    """Returns where the host's / is: by the option, else by the environment, else /.

    Raises:
        CommandError: it is missing, or not a directory.
    """
    given: Path | None = getattr(args, "host_root", None)
    root = given or Path(os.environ.get(ROOT_VARIABLE) or "/")
    try:
        is_directory = stat.S_ISDIR(root.stat().st_mode)
        wrong = "" if is_directory else f"{root}: no directory"
    except (OSError, ValueError) as error:
        wrong = reason(error)
    if wrong:
        raise CommandError(
            f"{'--host-root' if given else ROOT_VARIABLE}: {wrong}: name the directory where the "
            "host's / is mounted, or one that `npu-agent simulate` made",
            WRONG,
        )
    return root
