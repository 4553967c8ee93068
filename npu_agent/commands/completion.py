"""`npu-agent completion`: scripts by which shells complete our commands, options and values.

shtab writes them from the parsers; npu-agent is not run while somebody types.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from npu_agent.commands.catalogue import top


def main(args: argparse.Namespace) -> int:
    parser = top(whole=True)
    _add_values(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Tells shtab which arguments are files, directories, or one of a few words."""
    for action in parser._actions:  # noqa: SLF001 (as shtab itself does)
        if isinstance(action.choices, dict):
            for each in action.choices.values():
                _add_values(each)
        elif action.type is Path:
            files = shtab.FILE if action.metavar == "FILE" else shtab.DIRECTORY
            action.complete = files  # type: ignore[attr-defined]
        elif isinstance(action.metavar, str) and action.metavar.startswith("{"):
            action.choices = action.metavar.strip("{}").split(",")
