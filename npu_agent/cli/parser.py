"""argparse's parser, with errors of one line and suggestions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from npu_agent.cli import WRONG, program
from npu_agent.config.text import any_of, did_you_mean, gone
from npu_agent.text import printable, shown

if TYPE_CHECKING:
    from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and ends the process with an error of one line."""

    def __init__(self, **how: Any) -> None:
        """Takes what argparse's takes; descriptions keep their lines."""
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **how
        )

    def refuse_unknown_options(self, words: Sequence[str]) -> None:
        """Ends the process at a long option that is not known: argparse would not suggest one."""
        for word in words:
            name = word.partition("=")[0]
            if name == "--":
                return
            if name.startswith("--") and name not in self._option_string_actions:
                if removed := gone(name):
                    self.error(f"{name}: {removed}")
                hint = did_you_mean(name, self._option_string_actions)
                self.error(f"{shown(name)}: no such option{hint}")

    def error(self, message: str) -> NoReturn:
        """Ends the process: place and value are in the message, help is the remedy."""
        words = message.removeprefix("argument ")
        remedy = "" if words.endswith("?") else f"; see `{self.prog} --help`"
        self.exit(WRONG, f"{program()}: error: {printable(words)}{remedy}\n")

    def _check_value(self, action: argparse.Action, value: str) -> None:
        # argparse's words for it are others in each version of Python, and suggest nothing.
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(value, action.choices)
            if action.nargs == argparse.PARSER:
                words = f"{self.prog} {value}".removeprefix("npu-agent ")
                if removed := gone(words):
                    self.error(f"{words}: {removed}")
                self.error(f"{shown(value)}: no such command{hint}")
            words = any_of(tuple(action.choices))
            raise argparse.ArgumentError(action, f"must be {words}, not {shown(value)}{hint}")
