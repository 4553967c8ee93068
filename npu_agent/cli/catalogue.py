"""Every command of `npu-agent`: its help, and the arguments and options that it takes.

A command is an entry here, with its help (no docstring: python -OO has none), and a module of its
own. What is heavy is imported when a command is asked for: the agent itself loads what `run`
takes.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from npu_agent import __version__, config
from npu_agent.cli.parser import Parser
from npu_agent.vendors import REGISTRY, VENDORS

Argument: TypeAlias = Callable[[Parser], object]
"""Adds an argument or option to a parser, or several."""


class Command(NamedTuple):
    """A command of `npu-agent`: its help, and what it takes."""

    help: str
    arguments: tuple[Argument, ...]
    options: Literal["shown", "hidden", "log"]
    """Of the configuration: all, in its help or not; or those of the log."""
    usage: str | None


COMMANDS: dict[str, Command] = {}
"""Every command by its name (`config check`), in the order of the help."""
GROUPS = {
    "config": "Check, show or describe the configuration",
    "cdi": "Write the CDI spec of a host without Kubernetes",
    "dra": "Show what DRA publishes",
}
"""Commands that have others below them."""


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; exits if they are wrong or ask for help.

    In two steps: the command, then what it takes. So no other command's options are added, and
    options may stand between a command's arguments, which subparsers refuse before Python 3.12.7.
    """
    if "help" in given[:1]:
        given = [*given[1:], "--help"]
    first = top()
    words = {name.partition(" ")[0] for name in COMMANDS}
    first.refuse_unknown_options([*takewhile(lambda word: word not in words, given)])
    args, rest = first.parse_known_args(given)
    if args.command is None:
        first.refuse_unknown_options(rest)
        first.parse_args([*given, "--help"])  # ends the process
    parser = Parser(prog=f"npu-agent {args.command}", description=COMMANDS[args.command].help)
    add_arguments(args.command, parser)
    parser.refuse_unknown_options(rest)
    return parser.parse_intermixed_args(rest, args)


def top(*, whole: bool = False) -> Parser:
    """Parses the options before the command, and the command; `whole`: with all it takes."""
    makers = " and ".join(vendor.profile.title for vendor in VENDORS)
    parser = Parser(
        prog="npu-agent",
        description=f"Node agent for {makers} NPUs on Kubernetes.\n"
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
    config.add_options(parser, REGISTRY, group="log")
    groups = {"": _subcommands(parser)}
    for name in COMMANDS:
        group, _, word = name.rpartition(" ")
        if group not in groups:
            made = groups[""].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            groups[group] = _subcommands(made)
        summary = COMMANDS[name].help.partition("\n")[0].removesuffix(".")
        command = groups[group].add_parser(word, help=summary, add_help=whole)
        command.set_defaults(command=name, action=word)
        if whole:
            add_arguments(name, command)
    return parser


def _subcommands(parser: Parser) -> argparse._SubParsersAction[Parser]:
    parser._positionals.title = "commands"  # noqa: SLF001 (a group of its own would come last)
    parser.set_defaults(command=None)
    return parser.add_subparsers(metavar="COMMAND")


def add_arguments(name: str, parser: Parser) -> None:
    command = COMMANDS[name]
    parser.usage = command.usage
    for add in (*command.arguments, _HOST_ROOT):
        add(parser)
    group = "log" if command.options == "log" else None
    config.add_options(parser, REGISTRY, group, hidden=command.options == "hidden")


def _argument(*names: str, **how: Any) -> Argument:
    """An argument as argparse's `add_argument` takes it."""
    return lambda parser: parser.add_argument(*names, **how)


_HOST_ROOT = _argument(
    "--host-root",
    type=Path,
    metavar="DIR",
    default=argparse.SUPPRESS,
    help="where the host's / is mounted, or a simulated tree (default: $NPU_AGENT_HOST_ROOT, "
    "else /)",
)
_OUTPUT = _argument(
    *("-o", "--output", "--format"),
    choices=("table", "wide", "json", "yaml"),
    metavar="FORMAT",
    default="table",
    help="table fits the terminal; wide shows all columns; json and yaml are for programs "
    "(default: table)",
)
_TABLE = (
    _OUTPUT,
    _argument("--no-headers", action="store_true", help="only the rows of a table"),
)
_LIVE_TABLE = (
    *_TABLE,
    _argument("-w", "--watch", action="store_true", help="show every change until q or Ctrl-C"),
    _argument(
        "--plugin-dir",
        type=Path,
        metavar="DIR",
        help="the kubelet's device-plugins directory; its pod-resources directory is next to it "
        "(default: pluginDir of $NPU_AGENT_CONFIG_FILE, else $NPU_AGENT_PLUGIN_DIR, else "
        f"{config.Config().plugin_dir})",
    ),
)
"""For what the kubelet answers, which changes."""
_REASON = _argument("--reason", metavar="TEXT", default="", help="why, for people")
_EXAMPLE = ",".join(f"{family}=2" for family in REGISTRY.families)
"""Cards as `--simulate` takes them; the simulator is not to be loaded by the agent."""


def _add_npu(parser: Parser) -> None:
    parser.set_defaults(kubectl=None)
    parser.add_argument("npu", metavar="NPU", help="its name, UUID or PCI address")
    node = "the Node (default: $NODE_NAME, as in the agent's Pod)"
    parser.add_argument("--node", metavar="NAME", help=node)


def _add_simulate(parser: Parser) -> None:
    # Its help lists the faults, which the simulator knows.
    from npu_agent.people.commands.simulate import add_arguments

    add_arguments(parser)


def _command(
    name: str,
    text: str,
    *arguments: Argument,
    options: Literal["shown", "hidden", "log"] = "log",
    usage: str | None = None,
) -> None:
    COMMANDS[name] = Command(inspect.cleandoc(text), arguments, options, usage)


_command(
    "run",
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
    _argument(
        "--simulate",
        metavar="LIST",
        help=f"on a node without real cards: simulated ones, such as {_EXAMPLE}, in a driver tree "
        "below --host-root. Containers with such a card get /dev/null in place of its device nodes",
    ),
    options="shown",
    usage="%(prog)s [--config-file FILE]\n       %(prog)s [options]",
)

_command(
    "info",
    """List the cards of this host.

    Shows health, temperature, power, load, memory, and the Pods that hold them if
    the kubelet answers. What the running agent knows of their health counts, too.
    Without an agent the load of a busy card takes two readings, a second apart. A
    narrow terminal shows fewer columns; -o wide has the PCI address and UUID, too.

    Examples:
      npu-agent info          # the cards, as wide as the terminal
      npu-agent info -w       # each change, until q or Ctrl-C
      npu-agent info -o json  # a list with an object for each card
    """,
    *_LIVE_TABLE,
)

_command(
    "allocations",
    """List the containers that hold devices.

    Asks the kubelet's pod-resources API which containers hold NPUs, by the device
    plugin or by a ResourceClaim, and shows card and cores. Needs root.

    Examples:
      npu-agent allocations          # a line for each device
      npu-agent allocations -w       # each change, until q or Ctrl-C
      npu-agent allocations -o yaml  # for programs
    """,
    *_LIVE_TABLE,
)

_command(
    "labels",
    """Show, apply or clear the labels of the Node.

    The running agent keeps the labels up to date. apply and clear act once, and
    need NODE_NAME and the API server. While an entry that may be a card cannot be
    read, apply changes no existing label: exit code 1.

    Also takes the options of `npu-agent run`.

    Examples:
      npu-agent labels        # every label, its value, and why
      npu-agent labels apply  # put them on the Node now
      npu-agent labels clear  # remove all labels of npu-agent, to uninstall
    """,
    _argument(
        "action",
        nargs="?",
        choices=("show", "apply", "clear"),
        default="show",
        help="show: the labels for the Node, with reasons; apply: set them now; clear: remove "
        "all labels of npu-agent (default: show)",
    ),
    *_TABLE,
    options="hidden",
)

_command(
    "config check",
    """Check a configuration file.

    Shows every error with line, key and correction. The exit code is 2 if there
    is one.

    Examples:
      npu-agent config check config.yaml
    """,
    _argument("file", type=Path, metavar="FILE", help="a configuration, in YAML"),
)

_command(
    "config show",
    """Show the configuration that `run` would use with these options.

    Prints every key with its value and its origin: a line of the file, an option,
    or the default. The output is a configuration file.

    Examples:
      npu-agent config show --config-file config.yaml
      npu-agent config show --default-pe Single
    """,
    options="shown",
    usage="%(prog)s [options]",
)

_command(
    "config schema",
    """Print the JSON schema of the file, for editors.

    Examples:
      npu-agent config schema > schema.json
    """,
)

_command(
    "doctor",
    """Ask the running agent, and check what it needs, here and in the cluster.

    Changes nothing. Lists first what to fix, in order and with commands. The exit
    code is 1 if something is wrong.

    Also takes the options of `npu-agent run`.

    Examples:
      npu-agent doctor        # in the agent's Pod, or on the host as root
      npu-agent doctor --all  # with lines that do not apply here
    """,
    _OUTPUT,
    _argument("--all", action="store_true", help="also show lines that do not apply here"),
    options="hidden",
)

_command(
    "verify",
    """Check, inside a container, that it sees exactly its allocated NPUs.

    Checks that the NPUs are there, can be opened, and are the only ones. The exit
    code is 1 if not. Run it before the workload: opening a core occupies it for
    that moment.

    Examples:
      npu-agent verify             # a line for each finding
      npu-agent verify --expect 2  # fails unless there are two devices
    """,
    _OUTPUT,
    _argument(
        "--expect",
        type=int,
        metavar="N",
        help="number of requested devices (default: as many as are named)",
    ),
)

_command(
    "cordon",
    """Take one card out of service: no new Pod gets it.

    The Pods that hold it stay. Writes the Node's annotation npu-agent/cordoned,
    which the agent applies within two seconds. It lasts until `npu-agent
    uncordon`, also over restarts of agent and node.

    Examples:
      npu-agent cordon npu3                             # in the agent's Pod
      npu-agent cordon npu3 --node node-1 --reason=fan  # by a kubeconfig
    """,
    _add_npu,
    _REASON,
)

_command(
    "uncordon",
    """Bring a cordoned card back into service.

    Examples:
      npu-agent uncordon npu3 --node node-1
    """,
    _add_npu,
)

_command(
    "drain",
    """Cordon one card, evict the Pods that hold it, and wait until it is free.

    Pods on other cards are not touched. PodDisruptionBudgets are respected. Pods
    of a DaemonSet and static Pods are named, not evicted. Uses your kubeconfig and
    your rights: the agent has no right to evict. Reads the agent's page through
    the API server.

    Examples:
      npu-agent drain npu3 --node node-1 --dry-run
      npu-agent drain npu3 --node node-1 --reason=fan --timeout=600
    """,
    _add_npu,
    _REASON,
    _argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=300.0,
        help="longest wait until the card is free (default: 300)",
    ),
    _argument(
        "--grace-period",
        type=int,
        metavar="SECONDS",
        help="grace period of each Pod (default: its own)",
    ),
    _argument("--dry-run", action="store_true", help="only show the Pods that would be evicted"),
)

_command(
    "cdi generate",
    """Write the CDI spec of this host's cards, for Docker, Podman and others.

    For hosts without Kubernetes. Writes it to /etc/cdi, where container runtimes
    find cards by name, and prints the names. Run it again after each change of
    cards.

    Examples:
      npu-agent cdi generate           # write it, as root, and list the names
      npu-agent cdi generate --stdout  # print it
    """,
    _argument("--stdout", action="store_true", help="print the spec and write nothing"),
)

_command(
    "dra slices",
    f"""Print the ResourceSlices of a node that is still to be made.

    For an autoscaler that scales from zero nodes. They are what DRA publishes of
    these cards by this configuration, without what only a host has.

    Also takes the options of `npu-agent run`.

    Examples:
      npu-agent dra slices --template {_EXAMPLE}
      npu-agent dra slices --template {_EXAMPLE} --config-file config.yaml
    """,
    _argument(
        "--template", metavar="LIST", required=True, help=f"the node's cards, such as {_EXAMPLE}"
    ),
    options="hidden",
)

_command(
    "record",
    """Write what this host's drivers say to a file that you can send.

    For issues, and for cards that this project has not seen. Reads only, and opens
    no device node. Replaces serial numbers, UUIDs and host names by made-up ones.
    Look into the file before you send it: it is plain text in a tar.

    Examples:
      npu-agent record                    # npu-record.tar.gz; prints what is in it
      npu-agent record - > record.tar.gz  # as in the agent's Pod, by kubectl exec
    """,
    _argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=Path,
        default=Path("npu-record.tar.gz"),
        help="a new file, or - for stdout (default: npu-record.tar.gz)",
    ),
)

_command(
    "simulate",
    """Make a simulated driver tree, or break a card in one.

    Makes the files of a driver with simulated cards below ROOT, and changes their
    values until Ctrl-C. Any command reads them with --host-root ROOT. ROOT is made
    if it is missing, and refused if it holds other files.

    Examples:
      npu-agent simulate /tmp/host                  # until Ctrl-C
      npu-agent simulate /tmp/host fault npu0 dead  # break a card; ok repairs it
      npu-agent simulate /tmp/host status           # what is wrong with the cards
      npu-agent simulate /tmp/new --from FILE       # a host that was recorded
    """,
    _add_simulate,
)

_command(
    "demo",
    """Run the whole agent on simulated cards, in this terminal.

    Uses a stand-in for the kubelet: needs no cluster, no NPU and no root. Shows
    each step, and stays up until Ctrl-C.

    Examples:
      npu-agent demo         # the tour
      npu-agent demo --once  # exit after it
    """,
    _argument(
        "--once", action="store_true", help="exit after the tour; exit code 1 if a step failed"
    ),
)

_command(
    "completion",
    """Print a completion script for bash, zsh or fish.

    Examples:
      npu-agent completion bash > /etc/bash_completion.d/npu-agent
      npu-agent completion zsh > ~/.zfunc/_npu-agent
      npu-agent completion fish > ~/.config/fish/completions/npu-agent.fish
    """,
    _argument("shell", choices=("bash", "zsh", "fish"), help="the shell"),
)

_command(
    "version",
    """Show the version of npu-agent and its commit.

    Examples:
      npu-agent version
      npu-agent version -o json  # with the version of Python
    """,
    _OUTPUT,
)
