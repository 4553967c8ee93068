"""The parser of one command: what it takes, its help, and errors in one style.

It is argparse's, without abbreviations, and with help of its own: argparse's is another one in each
version of Python, and shows every option of the configuration with every command.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npu_agent.commands import WRONG
from npu_agent.config.text import any_of, did_you_mean
from npu_agent.text import shown

if TYPE_CHECKING:
    from typing import NoReturn

_TEXT = 22
"""The column in which the text on an option begins."""


def one_of(*words: str, besides: Sequence[str] = ()) -> Callable[[str], str]:
    """What reads one of these words; those `besides` are understood, and not named."""

    def read(text: str) -> str:
        if text in words or text in besides:
            return text
        hint = did_you_mean(text, words)
        raise argparse.ArgumentTypeError(f"must be {any_of(words)}, not {shown(text)}{hint}")

    return read


def count(text: str) -> int:
    """A whole number of things."""
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number, not {shown(text)}")


@dataclass(slots=True)
class Section:
    """Options that stand together in the help.

    Attributes:
        title: their heading.
        folded: whether only `--help-all` shows them.
        instead: what `--help` has in the place of folded ones.
    """

    title: str
    folded: bool = False
    instead: str = ""
    actions: list[argparse.Action] = field(default_factory=list)


class Parser(argparse.ArgumentParser):
    """Parses what follows the name of a command, which its `prog` ends with."""

    def __init__(
        self,
        prog: str,
        *,
        usage: str = "[options]",
        about: str = "",
        commands: Mapping[str, str] | None = None,
        examples: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Without options yet, but those that ask for help.

        Args:
            prog: ``npu-agent info``.
            usage: what may follow it; lines, if there are several ways.
            about: what it does.
            commands: the commands that it has below it, each with a few words.
            examples: each with a few words on what it does.
        """
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)
        self.ways = usage.splitlines()
        self.about = about
        self.commands = commands or {}
        self.examples = tuple(examples)
        self.sections: list[Section] = []
        self.add("options", "-h", "--help", action="help", help="show this help, and end")
        self.add(
            "options",
            "--help-all",
            action=_HelpAll,
            nargs=0,
            help="show this help with all options",
        )

    def add(self, title: str, *names: str, **how: Any) -> None:
        """Adds an option, or an argument, under this heading; `how` is for argparse."""
        self.put(title, [self.add_argument(*names, **how)])

    def put(
        self,
        title: str,
        actions: Iterable[argparse.Action],
        *,
        folded: bool = False,
        instead: str = "",
    ) -> None:
        """Takes note of options that were added, under this heading: see `Section`."""
        found = next((each for each in self.sections if each.title == title), None)
        if found is None:
            found = Section(title, folded, instead)
            self.sections.append(found)
        found.actions += actions

    @property
    def options(self) -> dict[str, argparse.Action]:
        """Every option by each of its names."""
        every = (action for section in self.sections for action in section.actions)
        return {name: action for action in every for name in action.option_strings}

    def parse(self, given: Sequence[str], into: argparse.Namespace) -> argparse.Namespace:
        """Parses all of `given` into a namespace; ends the process where it is wrong."""
        for word in given:
            name = word.partition("=")[0]
            if name == "--":
                break
            if name.startswith("--") and name not in self.options:
                hint = did_you_mean(name, (each for each in self.options if each[:2] == "--"))
                self.error(f"{shown(name)}: no such option{hint}")
        _, extra = self.parse_known_intermixed_args(given, into)
        if extra:
            kind = "no such option" if extra[0].startswith("-") else "one argument too many"
            self.error(f"{shown(extra[0])}: {kind}")
        return into

    def error(self, message: str) -> NoReturn:
        """Ends the process: place and value are in the message, help is the remedy."""
        words = message.removeprefix("argument ")
        remedy = "" if words.endswith("?") else f"; see `{self.prog} --help`"
        self.exit(WRONG, f"npu-agent: error: {words}{remedy}\n")

    def format_usage(self) -> str:
        """Each way to use it in a line."""
        return "".join(
            f"{'       ' if at else 'usage: '}{self.prog} {way}".rstrip() + "\n"
            for at, way in enumerate(self.ways)
        )

    def format_help(self, *, everything: bool = False) -> str:
        """The page; with `everything` no section is left out."""
        width = max(40, min(shutil.get_terminal_size((80, 24)).columns, 100) - 2)
        parts = [self.format_usage(), *([_filled(self.about, width)] if self.about else [])]
        if self.commands:
            rows = [_columns(f"    {name}", words, width) for name, words in self.commands.items()]
            parts.append("".join(("commands:\n", *rows)))
        # What a command has of its own comes before what all of them have.
        sections = sorted(self.sections, key=lambda each: each.title != "arguments")
        for section in sections:
            if everything or not section.folded:
                own_first = sorted(section.actions, key=lambda each: each.dest.startswith("help"))
                rows = [_row(action, width) for action in own_first]
                title = section.title if ": " in section.title else f"{section.title}:"
                parts.append(f"{_filled(title, width)}{''.join(rows)}")
        if not everything:
            lines = (_filled(each.instead, width) for each in self.sections if each.folded)
            parts += ["".join(lines)]
        if self.examples:
            longest = max(len(example) for example, _ in self.examples)
            rows = [
                f"  {example:{longest}}  # {words}\n"
                if longest + len(words) + 6 <= width
                else f"  # {words}\n  {example}\n"
                for example, words in self.examples
            ]
            parts.append("".join(("examples:\n", *rows)))
        if self.epilog:
            parts.append(f"{self.epilog}\n")
        return "\n".join(part for part in parts if part)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)  # noqa: S101  (for the type checker)
        print(parser.format_help(everything=True), end="")
        parser.exit()


def _filled(text: str, width: int) -> str:
    """Each paragraph in lines of this width."""
    return "".join(f"{_wrapped(part, width)}\n" for part in text.splitlines())


def _row(action: argparse.Action, width: int) -> str:
    """An option with its text."""
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    names = ", ".join(action.option_strings)
    left = f"  {names}{value}" if names else f"  {value.strip()}"
    return _columns(left, action.help or "", width)


def _columns(left: str, right: str, width: int) -> str:
    """Two columns; what is too long for the left one stands on a line of its own."""
    text = _wrapped(right, width, " " * _TEXT)
    if len(left) + 2 > _TEXT:
        return f"{left}\n{text}\n"
    return f"{left:{_TEXT}}{text.lstrip()}\n"


def _wrapped(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
