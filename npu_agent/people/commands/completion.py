"""`npu-agent completion`: scripts by which shells complete our commands, options and values.

shtab writes them from the parsers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from npu_agent.cli.catalogue import all_commands, top
from npu_agent.people.simulator.faults import FAULTS


def main(args: argparse.Namespace) -> int:
    parser = top(all_commands(), whole=True)
    _add_values(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Tells shtab which arguments are files, directories, or one of a few words."""
    for action in parser._actions:  # noqa: SLF001 (as shtab itself does)
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if isinstance(action.choices, dict):
            for choice in action.choices.values():
                _add_values(choice)
        elif action.type is Path:
            action.complete = shtab.FILE if metavar == "FILE" else shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest == "fault":
            action.choices = [*FAULTS]
        elif metavar.startswith("{"):
            action.choices = metavar[1:].partition("}")[0].split(",")
