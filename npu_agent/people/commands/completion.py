"""`npu-agent completion`: scripts by which shells complete our commands, options and values.

shtab writes them from the parsers. npu-agent itself is run only for the names of cards.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from npu_agent.cli.catalogue import all_commands, top
from npu_agent.cli.common import ROOT_VARIABLE as _ROOT
from npu_agent.people.simulator.faults import FAULTS
from npu_agent.vendors import REGISTRY

_LIST = (
    "command npu-agent info --no-headers 2>/dev/null"
    " | sed -n 's/^ *\\([a-z]*[0-9][0-9]*\\) .*/\\1/p'"
)
_CARDS = {
    "bash": "_npu_agent_cards",
    "zsh": "_npu_agent_cards",
    "fish": "(_npu_agent_cards)",
    "preamble": {
        "bash": f"""\
_npu_agent_cards() {{
  [[ ${{COMP_WORDS[1]}} != simulate ]] || local -x {_ROOT}=${{COMP_WORDS[2]/#\\~/$HOME}}
  compgen -W "$({_LIST})" -- "$1"
}}""",
        "zsh": f"""\
_npu_agent_cards() {{
  [[ $words[1] != simulate ]] || local -x {_ROOT}=${{words[2]/#\\~/$HOME}}
  compadd -- $({_LIST})
}}""",
        "fish": f"""\
function _npu_agent_cards
  set -l words (commandline -opc)
  test "$words[2]" != simulate; or set -lx {_ROOT} (string replace -r '^~' $HOME $words[3])
  {_LIST}
end""",
    },
}
"""How each shell lists the cards: of the tree that `simulate` is about, else of this host."""
_WORDS = {
    "fault": (*FAULTS,),
    "config.resourceName": (REGISTRY.resource_name,),
}
"""By the argument's `dest`."""


def main(args: argparse.Namespace) -> int:
    parser = top(all_commands(), whole=True)
    _add_values(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Tells shtab which arguments are files, directories, cards, or one of a few words."""
    for action in parser._actions:  # noqa: SLF001 (as shtab itself does)
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if isinstance(action.choices, dict):
            for choice in action.choices.values():
                _add_values(choice)
        elif action.type is Path:
            action.complete = shtab.FILE if metavar == "FILE" else shtab.DIRECTORY  # type: ignore[attr-defined]
        elif metavar in ("CARD", "NPU", "DEVICE,..."):
            action.complete = _CARDS  # type: ignore[attr-defined]
        elif action.dest in _WORDS:
            action.choices = _WORDS[action.dest]
        elif metavar.startswith("{"):
            action.choices = metavar[1:].partition("}")[0].split(",")
