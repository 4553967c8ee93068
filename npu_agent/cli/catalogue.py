"""The command line: its parser, and what `run` takes.

A command is an entry: its help (no docstring: python -OO has none), arguments and options. The
others are in `npu_agent.people.commands.catalogue`, which the agent does not load.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from npu_agent import __version__, config
from npu_agent.cli.parser import Parser
from npu_agent.vendors import PROFILE, SPEC

Argument: TypeAlias = Callable[[Parser], object]
"""Adds an argument or option to a parser, or several."""


GROUPS = {
    "config": "Check, show or describe the configuration",
    "cdi": "Write the CDI spec of a host without Kubernetes",
    "dra": "Show what DRA publishes",
}
"""Commands that have others below them."""


class Command(NamedTuple):
    """A command of `npu-agent`: its help, and what it takes."""

    help: str
    arguments: tuple[Argument, ...]
    options: Literal["shown", "hidden", "log"]
    """Of the configuration: all, in its help or not; or those of the log."""
    usage: str | None

    @classmethod
    def of(
        cls,
        text: str,
        *arguments: Argument,
        options: Literal["shown", "hidden", "log"] = "log",
        usage: str | None = None,
    ) -> Command:
        """Takes the help with the indentation of a docstring."""
        return cls(inspect.cleandoc(text), arguments, options, usage)


def all_commands() -> Mapping[str, Command]:
    """Every command by its name (`config check`), in the order of the help."""
    from npu_agent.people.commands.catalogue import COMMANDS

    return {"run": RUN, **COMMANDS}


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; exits if they are wrong or ask for help.

    In two steps: the command, then what it takes. So no other command's options are added, and
    options may stand between a command's arguments, which subparsers refuse before Python 3.12.7.
    """
    if "help" in given[:1]:
        given = [*given[1:], "--help"]
    commands = {"run": RUN} if given[:1] == ["run"] else all_commands()
    first = top(commands)
    words = {name.partition(" ")[0] for name in commands}
    first.refuse_unknown_options([*takewhile(lambda word: word not in words, given)])
    args, rest = first.parse_known_args(given)
    if args.command is None:
        first.refuse_unknown_options(rest)
        first.parse_args([*given, "--help"])  # ends the process
    command = commands[args.command]
    parser = Parser(prog=f"npu-agent {args.command}", description=command.help)
    add_arguments(command, parser)
    parser.refuse_unknown_options(rest)
    return parser.parse_intermixed_args(rest, args)


def top(commands: Mapping[str, Command], *, whole: bool = False) -> Parser:
    """Parses the options before the command, and the command; `whole`: with all it takes."""
    parser = Parser(
        prog="npu-agent",
        description=f"Node agent for {PROFILE.title} NPUs on Kubernetes.\n"
        "`npu-agent COMMAND --help` has more on a command.",
        epilog="""\
Examples:
  npu-agent demo    # see everything, without a cluster and without an NPU
  npu-agent info    # the cards of this host
  npu-agent doctor  # what is wrong here, and how to fix it
""",
    )
    version = f"npu-agent {__version__}"
    parser.add_argument(
        *("-V", "--version"), action="version", version=version, help="show the version and exit"
    )
    _HOST_ROOT(parser)
    config.add_options(parser, SPEC, group="log")
    groups = {"": _subcommands(parser)}
    for name, command in commands.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            made = groups[""].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            groups[group] = _subcommands(made)
        summary = command.help.partition("\n")[0].removesuffix(".")
        subparser = groups[group].add_parser(word, help=summary, add_help=whole)
        subparser.set_defaults(command=name, action=word)
        if whole:
            add_arguments(command, subparser)
    return parser


def _subcommands(parser: Parser) -> argparse._SubParsersAction[Parser]:
    parser._positionals.title = "commands"  # noqa: SLF001 (a group of its own would come last)
    parser.set_defaults(command=None)
    return parser.add_subparsers(metavar="COMMAND")


def add_arguments(command: Command, parser: Parser) -> None:
    parser.usage = command.usage
    for add in (*command.arguments, _HOST_ROOT):
        add(parser)
    group = "log" if command.options == "log" else None
    config.add_options(parser, SPEC, group, hidden=command.options == "hidden")


def argument(*names: str, **how: Any) -> Argument:
    """An argument as argparse's `add_argument` takes it."""
    return lambda parser: parser.add_argument(*names, **how)


_HOST_ROOT = argument(
    "--host-root",
    type=Path,
    metavar="DIR",
    default=argparse.SUPPRESS,
    help="where the host's / is mounted, or a simulated tree (default: $NPU_AGENT_HOST_ROOT, "
    "else /)",
)
EXAMPLE = ",".join(f"{family}=2" for family in SPEC.families)
"""Cards as `--simulate` takes them; the simulator is not to be loaded by the agent."""

RUN = Command.of(
    """Run the agent, as the DaemonSet does.

    Runs until SIGTERM: offers this node's cards to the kubelet, labels the Node,
    and serves metrics and a status page.

    Every option is also a key of the configuration file: give either options or
    --config-file. The agent applies changes of that file while it runs.

    Examples:
      npu-agent run  # the defaults
      npu-agent run --default-pe Single --labels-output none
      npu-agent run --config-file /etc/npu-agent/config.yaml  # as the DaemonSet
    """,
    argument(
        "--simulate",
        metavar="LIST",
        help=f"on a node without real cards: simulated ones, such as {EXAMPLE}, in a driver tree "
        "below --host-root. Containers with such a card get /dev/null in place of its device nodes",
    ),
    options="shown",
    usage="%(prog)s [--config-file FILE]\n       %(prog)s [options]",
)
