"""Finds the command, and runs its module.

That is imported when it is run, so that `--help` is quick and `run` stays small.
Exit codes: 0 fine, 1 failed, 2 wrong use or wrong config.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from npu_agent import config
from npu_agent.cli import FAILED, WRONG, CommandError, catalogue, program
from npu_agent.text import printable, reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (default: the process's) name; returns the exit code."""
    if sys.stdout is None:  # closed: else the next file that is opened would be in its place
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (for the process)
    _print_everything()
    try:
        try:
            args = _parse(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()  # of help, too: the reader may have gone
        code: int = module_of(getattr(args, "module", args.command)).main(args)
        sys.stdout.flush()
    except config.ConfigError as error:
        return _failed(WRONG, *map(str, error.problems))
    except CommandError as error:
        return _failed(error.code, str(error))
    except KeyboardInterrupt:
        return 128 + 2
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # With EPIPE the reader (`| head`) has gone.
        return _failed(FAILED, *([reason(error)] if error.errno == errno.ENOSPC else []))
    return code


def module_of(command: str) -> ModuleType:
    """Imports the module of a command: `run` is in this package, the others are people's."""
    name = command.partition(" ")[0]
    room = "cli" if name == "run" else "people.commands"
    return import_module(f"npu_agent.{room}.{name}")


def _parse(given: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments as `npu-agent`, or as kubectl's plugin, by the program's name."""
    if program() == "npu-agent":
        return catalogue.parse(given)
    if Path(sys.argv[0]).name.startswith("kubectl_complete-"):
        return argparse.Namespace(command="kubectl_complete", words=given)
    from npu_agent.people.commands import kubectl

    args = kubectl.parser().parse_args(given)
    args.module = "kubectl"
    return args


def _print_everything() -> None:
    """Prints a "?" for what stdout's encoding lacks, in place of an error.

    What was chosen by PYTHONIOENCODING stays; the two below are Python's own for a locale.
    """
    by_locale = ("strict", "surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in by_locale:
        sys.stdout.reconfigure(errors="replace")


def _failed(code: int, *problems: str) -> int:
    for problem in problems:
        print(f"{program()}: error: {printable(problem)}", file=sys.stderr)
    return code
