"""The commands for people: the help, the arguments and the options of each.

`npu_agent.cli.catalogue` has `run` and the parser. A command is an entry here, and a module of its
own in this folder.
"""

from __future__ import annotations

from pathlib import Path

from npu_agent.cli.catalogue import EXAMPLE, Command, argument
from npu_agent.cli.parser import Parser

COMMANDS: dict[str, Command] = {}
"""Every one by its name (`config check`), in the order of the help."""

_OUTPUT = argument(
    *("-o", "--output", "--format"),
    choices=("table", "wide", "json", "yaml"),
    metavar="FORMAT",
    default="table",
    help="table (fits the terminal), wide (all columns), json or yaml",
)
_TABLE = (
    _OUTPUT,
    argument("--no-headers", action="store_true", help="only the rows of a table"),
)
_LIVE_TABLE = (
    *_TABLE,
    argument("-w", "--watch", action="store_true", help="go on until q or Ctrl-C"),
    argument(
        "--plugin-dir",
        type=Path,
        metavar="DIR",
        help="the kubelet's device-plugins directory (default: pluginDir of the configuration)",
    ),
)
"""For what the kubelet answers, which changes."""
_REASON = argument("--reason", metavar="TEXT", default="", help="why, for people")


def _add_npu(parser: Parser) -> None:
    parser.set_defaults(kubectl=None)
    parser.add_argument("npu", metavar="NPU", help="its name, UUID or PCI address")
    node = "the Node (default: $NODE_NAME, as in the agent's Pod)"
    parser.add_argument("--node", metavar="NAME", help=node)


def _add_simulate(parser: Parser) -> None:
    # Its help lists the faults, which the simulator knows.
    from npu_agent.people.commands.simulate import add_arguments

    add_arguments(parser)


COMMANDS["info"] = Command.of(
    """List the cards of this host.

    Shows health, temperature, power, load and memory, and the Pods that hold them.
    Asks the running agent and the kubelet, too, if they answer.

    Examples:
      npu-agent info          # the cards, as wide as the terminal
      npu-agent info -o json  # a list with an object for each card
    """,
    *_LIVE_TABLE,
)

COMMANDS["list"] = Command.of(
    """List the cards of this host, as info does.

    Examples:
      npu-agent list  # the same as `npu-agent info`
    """,
    *_LIVE_TABLE,
)

COMMANDS["allocations"] = Command.of(
    """List the containers that hold devices.

    Asks the kubelet's pod-resources API, and needs root.

    Examples:
      npu-agent allocations     # a line for each device
      npu-agent allocations -w  # until q or Ctrl-C
    """,
    *_LIVE_TABLE,
)

COMMANDS["labels"] = Command.of(
    """Show, apply or clear the labels of the Node.

    The running agent keeps the labels up to date. apply and clear act once, and
    need NODE_NAME and the API server.

    Also takes the options of `npu-agent run`.

    Examples:
      npu-agent labels        # every label, its value, and why
      npu-agent labels apply  # put them on the Node now
      npu-agent labels clear  # remove all labels of npu-agent, to uninstall
    """,
    argument(
        "action",
        nargs="?",
        choices=("show", "apply", "clear"),
        default="show",
        help="default: show",
    ),
    *_TABLE,
    options="hidden",
)

COMMANDS["config check"] = Command.of(
    """Check a configuration file: every error with line, key and correction.

    Examples:
      npu-agent config check config.yaml
    """,
    argument("file", type=Path, metavar="FILE", help="a configuration, in YAML; -: standard input"),
)

COMMANDS["config show"] = Command.of(
    """Show the configuration that `run` would use with these options.

    Prints every key with its value and its origin, as a configuration file.

    Examples:
      npu-agent config show --config-file config.yaml
    """,
    options="shown",
    usage="%(prog)s [options]",
)

COMMANDS["config schema"] = Command.of(
    """Print the JSON schema of the file, for editors.

    Examples:
      npu-agent config schema > schema.json
    """,
)

COMMANDS["doctor"] = Command.of(
    """Ask the running agent, and check what it needs, here and in the cluster.

    Changes nothing. Lists first what to fix, in order and with commands.

    Also takes the options of `npu-agent run`.

    Examples:
      npu-agent doctor        # in the agent's Pod, or on the host as root
      npu-agent doctor --all  # with lines that do not apply here
    """,
    _OUTPUT,
    argument("--all", action="store_true", help="also show lines that do not apply here"),
    options="hidden",
)

COMMANDS["verify"] = Command.of(
    """Check, inside a container, that a job can run on its allocated NPUs.

    Opens the device nodes, and tries io_uring where jobs on the card need it.
    Run it before the workload: opening a core occupies it for that moment.

    Examples:
      npu-agent verify             # a line for each finding
      npu-agent verify --expect 2  # fails unless there are two devices
    """,
    _OUTPUT,
    argument(
        "--expect",
        type=int,
        metavar="N",
        help="number of requested devices (default: as many as are named)",
    ),
)

COMMANDS["cordon"] = Command.of(
    """Take one card out of service: no new Pod gets it.

    The Pods that hold it stay. Writes the Node's annotation npu-agent/cordoned.

    Examples:
      npu-agent cordon npu3                             # in the agent's Pod
      npu-agent cordon npu3 --node node-1 --reason=fan  # by a kubeconfig
    """,
    _add_npu,
    _REASON,
)

COMMANDS["uncordon"] = Command.of(
    """Bring a cordoned card back into service.

    Examples:
      npu-agent uncordon npu3 --node node-1
    """,
    _add_npu,
)

COMMANDS["drain"] = Command.of(
    """Cordon one card, evict the Pods that hold it, and wait until it is free.

    Respects PodDisruptionBudgets. Pods of a DaemonSet and static Pods are named,
    not evicted. Uses your kubeconfig and your rights.

    Examples:
      npu-agent drain npu3 --node node-1 --dry-run
      npu-agent drain npu3 --node node-1 --reason=fan --timeout=600
    """,
    _add_npu,
    _REASON,
    argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=300.0,
        help="longest wait until the card is free (default: 300)",
    ),
    argument(
        "--grace-period",
        type=int,
        metavar="SECONDS",
        help="grace period of each Pod (default: its own)",
    ),
    argument("--dry-run", action="store_true", help="only show the Pods that would be evicted"),
)

COMMANDS["cdi generate"] = Command.of(
    """Write the CDI spec of this host's cards, for Docker, Podman and others.

    For hosts without Kubernetes. Run it again after each change of cards.

    Examples:
      npu-agent cdi generate           # write it, as root, and list the cards
      npu-agent cdi generate --stdout  # print it
    """,
    argument("--stdout", action="store_true", help="print the spec and write nothing"),
    argument("--all", action="store_true", help="list parts of cards, too"),
)

COMMANDS["dra slices"] = Command.of(
    f"""Print the ResourceSlices of a node that is still to be made.

    For an autoscaler that scales from zero nodes. Without what only a host has.

    Also takes the options of `npu-agent run`.

    Examples:
      npu-agent dra slices --template {EXAMPLE}
    """,
    argument(
        "--template", metavar="LIST", required=True, help=f"the node's cards, such as {EXAMPLE}"
    ),
    options="hidden",
)

COMMANDS["record"] = Command.of(
    """Write what this host's drivers say to a file that you can send.

    For issues. Replaces the known serial numbers, UUIDs, MAC and IP addresses and
    host names by made-up ones, and names the files that may have others.

    Examples:
      npu-agent record                           # prints what is in it
      npu-agent record --show npu-record.tar.gz  # all that you would send
      npu-agent record - > record.tar.gz         # in the agent's Pod, by exec
    """,
    argument("--show", action="store_true", help="print what is in FILE, file by file"),
    argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=Path,
        default=Path("npu-record.tar.gz"),
        help="a new file, or - for stdout (default: npu-record.tar.gz)",
    ),
)

COMMANDS["simulate"] = Command.of(
    """Make a simulated driver tree, or break a card in one.

    Makes the files of a driver with simulated cards below ROOT, and changes their
    values until Ctrl-C. Any command reads them with --host-root ROOT.

    Examples:
      npu-agent simulate /tmp/host                  # until Ctrl-C
      npu-agent simulate /tmp/host fault npu0 dead  # break a card; ok repairs it
      npu-agent simulate /tmp/new --from FILE       # a host that was recorded
    """,
    _add_simulate,
)

COMMANDS["demo"] = Command.of(
    """Run the whole agent on simulated cards, in this terminal.

    Needs no cluster, no NPU and no root. Shows each step; ends with Ctrl-C.

    Examples:
      npu-agent demo         # the tour
      npu-agent demo --once  # exit after it
    """,
    argument("--once", action="store_true", help="exit after the tour; 1 if a step failed"),
)

COMMANDS["completion"] = Command.of(
    """Print a completion script for bash, zsh or fish.

    Examples:
      npu-agent completion bash > /etc/bash_completion.d/npu-agent
      npu-agent completion zsh > ~/.zfunc/_npu-agent
    """,
    argument("shell", choices=("bash", "zsh", "fish"), help="the shell"),
)

COMMANDS["version"] = Command.of(
    """Show the version of npu-agent and its commit.

    Examples:
      npu-agent version -o json  # with the version of Python
    """,
    _OUTPUT,
)
