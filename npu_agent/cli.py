"""The command line: finds the command, and runs its module of `npu_agent.commands`.

That is imported when it is run, so that `--help` is quick and `run` stays small.
Exit codes: 0 fine, 1 failed, 2 wrong use or wrong config.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import stat
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from npu_agent import config
from npu_agent.commands import FAILED, WRONG, CommandError
from npu_agent.commands.catalogue import COMMANDS, GROUPS, below, group, top
from npu_agent.commands.parser import Parser
from npu_agent.config.text import did_you_mean
from npu_agent.text import printable, reason, shown

_STDOUT = 1
"""Its file descriptor."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (default: the process's) name; returns the exit code."""
    _hold_stdout()
    _print_everything()
    try:
        try:
            args = parse(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()  # of help, too: whoever should read it may have gone
        _check_host_root(args)
        code: int = import_module(COMMANDS[args.command].module).main(args)
        sys.stdout.flush()
    except config.ConfigError as error:
        return _failed(WRONG, *map(str, error.problems))
    except CommandError as error:
        return _failed(error.code, str(error))
    except KeyboardInterrupt:
        return 128 + 2
    except BrokenPipeError:
        _drop_stdout()  # the reader (`| head`) has gone
        return FAILED
    except OSError as error:
        if not _is_of_stdout():
            raise
        _drop_stdout()
        why = "it is closed" if error.errno == errno.EBADF else reason(error)
        return _failed(FAILED, f"standard output cannot be written: {why}")
    return code


def _hold_stdout() -> None:
    """Where stdout is closed, makes it one that cannot be written.

    Python has none then, and takes every print for done; and the next file that is opened would be
    the standard output of the processes that are started here. `run` needs none.
    """
    if sys.stdout is None:
        null = os.open(os.devnull, os.O_RDONLY)
        if null != _STDOUT:
            os.dup2(null, _STDOUT)
            os.close(null)
        sys.stdout = open(_STDOUT, "w", closefd=False)  # noqa: SIM115 (for the process)


def _print_everything() -> None:
    """Has a "?" printed for what stdout's encoding lacks, in place of an error.

    Whoever chose another way, by PYTHONIOENCODING, gets that. On stderr Python never fails: it
    prints such characters as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _is_of_stdout() -> bool:
    """Whether stdout is what could not be written: it still cannot."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _drop_stdout() -> None:
    """Sends what is left to nowhere: Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(given: Sequence[str]) -> argparse.Namespace:
    """What the arguments ask for; ends the process where they are wrong, or ask for help."""
    first = top()
    at = _command_at(given, first)
    args = first.parse(given[:at], argparse.Namespace())
    words, rest = given[at : at + 1], given[at + 1 :]
    if not words:
        first.error(f"COMMAND is missing: one of {', '.join(below(''))}")
    name = words[0]
    if name in GROUPS:
        name, rest = _below(group(name), name, rest)
    elif name not in COMMANDS:
        hint = did_you_mean(name, (*below(""), "--help", "--version"))
        first.error(f"{shown(name)}: no such command{hint}")
    return COMMANDS[name].parser().parse(rest, args)


def _command_at(given: Sequence[str], parser: Parser) -> int:
    """The index of the command: of the first word that is no option, and no option's value."""
    options, at = parser.options, 0
    while at < len(given) and given[at].startswith("-"):
        option = options.get(given[at])
        at += 2 if option is not None and option.nargs != 0 else 1
    return min(at, len(given))


def _below(parser: Parser, name: str, rest: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command below `name` that `rest` begins with, and what follows it."""
    word = next(iter(rest), "")
    if not word or word.startswith("-"):
        parser.parse(rest, argparse.Namespace())
        parser.error(f"COMMAND is missing: one of {', '.join(parser.commands)}")
    if word not in parser.commands:
        hint = did_you_mean(word, parser.commands)
        parser.error(f"{shown(word)}: no such command below {name}{hint}")
    return f"{name} {word}", rest[1:]


def _check_host_root(args: argparse.Namespace) -> None:
    """Raises CommandError if there is no such directory: everything would look as without cards."""
    root: Path | None = getattr(args, "host_root", None)
    if root is None:
        return
    try:
        there = stat.S_ISDIR(root.stat().st_mode)
        wrong = "" if there else f"{root}: no directory"
    except (OSError, ValueError) as error:
        wrong = reason(error)
    if wrong:
        raise CommandError(
            f"--host-root: {wrong}: name the directory where the host's / is mounted, or one that "
            "`npu-agent simulate` made",
            WRONG,
        )


def _failed(code: int, *problems: str) -> int:
    for problem in problems:
        print(f"npu-agent: error: {printable(problem)}", file=sys.stderr)
    return code
