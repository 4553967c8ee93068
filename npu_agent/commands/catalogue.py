"""Every command: what it is for, examples, and what it takes.

A command is an entry here and a module of its own in this package. What is heavy is imported when a
command is asked for: the agent itself loads the parser of `run`, and no other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from npu_agent import __version__, config
from npu_agent.commands.parser import Parser, count, one_of
from npu_agent.vendors import VENDORS, WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command, or one below another: ``config check``."""

    name: str
    summary: str
    """A few words for lists of commands."""
    about: str
    usage: str = "[options]"
    examples: tuple[tuple[str, str], ...]
    """What to type behind ``npu-agent``, and what it does."""
    takes: Callable[[Parser], None] = lambda _: None
    """Adds its arguments and options."""
    configures: str | None = None
    """What `--help` has in place of the options of the configuration; "": these; None: it takes
    none."""

    @property
    def module(self) -> str:
        """The one that does it."""
        return f"npu_agent.commands.{self.name.partition(' ')[0]}"

    def parser(self) -> Parser:
        """What parses its arguments."""
        made = Parser(
            f"npu-agent {self.name}",
            usage=self.usage,
            about=self.about,
            examples=[(f"npu-agent {what}".rstrip(), why) for what, why in self.examples],
        )
        self.takes(made)
        configured = self.configures is not None
        if configured:
            for title, actions in config.add_options(made, WORDS).items():
                # One line stands for all groups of them.
                instead = self.configures if title == "configuration" else ""
                made.put(title, actions, folded=bool(self.configures), instead=instead or "")
        add_common(made, log=not configured)
        made.set_defaults(command=self.name)
        if action := self.name.partition(" ")[2]:
            made.set_defaults(action=action)
        return made


def add_common(parser: Parser, *, log: bool = True, folded: bool = True) -> None:
    """What goes with any command; `log` if the parser has not all options of the config."""
    names = "--host-root"
    actions = [
        parser.add_argument(
            "--host-root",
            type=Path,
            metavar="DIR",
            default=argparse.SUPPRESS,
            help="Where the host's / is mounted, or a simulated tree. (default: /)",
        )
    ]
    if log:
        names += ", --log-level, --log-format"
        for added in config.add_options(parser, WORDS, group="log").values():
            actions += added
    parser.put(
        "common options",
        actions,
        folded=folded,
        instead=f"With any command: {names} (see --help-all).",
    )


_FORMATS = ("table", "wide", "json", "yaml")
_AS_RUN = (
    "The configuration comes from --config-file FILE, or from the options of `npu-agent run`: "
    "--help-all lists them."
)


def _output(parser: Parser, *besides: str) -> None:
    parser.add(
        "options",
        *("-o", "--output", "--format"),
        metavar=f"{{{','.join(_FORMATS)}}}",
        type=one_of(*_FORMATS, besides=besides),
        default="table",
        help="table fits the terminal; wide has everything, and is never cut; json and yaml are "
        "for programs (default: table)",
    )


def _watch(parser: Parser) -> None:
    _output(parser)
    parser.add(
        "options",
        *("-w", "--watch"),
        action="store_true",
        help="go on until Ctrl-C, and show every change",
    )


def _allocations(parser: Parser) -> None:
    _watch(parser)
    parser.add(
        "options",
        "--plugin-dir",
        type=Path,
        default=Path(config.Config().plugin_dir),
        metavar="DIR",
        help="the kubelet's device-plugins directory; its pod-resources directory is beside it "
        f"(default: {config.Config().plugin_dir})",
    )


def _labels(parser: Parser) -> None:
    parser.add(
        "arguments",
        "action",
        metavar="show|apply|clear",
        nargs="?",
        type=one_of("show", "apply", "clear"),
        default="show",
        help="show: what would be put on the Node, and why; apply: put it there now; clear: take "
        "all of our labels away (default: show)",
    )
    _output(parser)


def _check(parser: Parser) -> None:
    parser.add("arguments", "file", type=Path, metavar="FILE", help="a configuration, in YAML")


def _doctor(parser: Parser) -> None:
    _output(parser)
    parser.add(
        "options",
        "--all",
        action="store_true",
        help="show the lines, too, that follow from others or do not apply here",
    )


def _verify(parser: Parser) -> None:
    _output(parser, "text")
    parser.add(
        "options",
        "--expect",
        type=count,
        metavar="N",
        help="how many devices the container asked for (default: as many as are named)",
    )


def _run(parser: Parser) -> None:
    parser.add(
        "options",
        "--no-kubelet",
        dest="kubelet",
        action="store_false",
        help="on a host without Kubernetes: health, metrics, the status page, and CDI specs in "
        "/etc/cdi, as `npu-agent cdi watch` writes them; no Pods, labels or Events",
    )


def _cdi(parser: Parser) -> None:
    parser.add(
        "arguments",
        "action",
        metavar="generate|watch",
        nargs="?",
        type=one_of("generate", "watch"),
        default="generate",
        help="generate: write the specs now; watch: go on until Ctrl-C, and keep them true to the "
        "cards (default: generate)",
    )
    parser.add(
        "options",
        "--stdout",
        action="store_true",
        help="with generate: print the specs and write nothing",
    )


def _simulate(parser: Parser) -> None:
    # Its help lists the faults, which the simulator knows.
    added = import_module("npu_agent.commands.simulate").add_arguments(parser)
    for action in added:
        parser.put("options" if action.option_strings else "arguments", [action])


def _demo(parser: Parser) -> None:
    parser.add(
        "options",
        "--once",
        action="store_true",
        help="end after the tour; exit code 1 if a step failed",
    )


def _completion(parser: Parser) -> None:
    parser.add(
        "arguments",
        "shell",
        metavar="bash|zsh|fish",
        type=one_of("bash", "zsh", "fish"),
        help="the shell that is to complete",
    )


COMMANDS = {
    each.name: each
    for each in (
        Command(
            name="run",
            summary="the agent: what the DaemonSet runs",
            about="Runs the agent until SIGTERM: it offers this node's cards to the kubelet, "
            "labels the Node, and serves metrics and a status page.\n\n"
            "Every option is a key of the configuration file, too: give either options or "
            "--config-file, which is followed while the agent runs. docs/configuration.md has all "
            "of them.",
            usage="[--config-file FILE]\n[options]",
            examples=(
                ("run", "the defaults"),
                ("run --config-file /etc/npu-agent/config.yaml", "as the DaemonSet does"),
                ("run --default-pe Single --labels-output none", "one device for each core"),
            ),
            takes=_run,
            configures="",
        ),
        Command(
            name="info",
            summary="the cards of this host",
            about="Shows the NPUs of this host: health, temperature, power, and the Pods that hold "
            "them where the kubelet can be asked. On a narrow terminal PCI-DEV and PCI-BDF are "
            "left out first; -o wide has every column.",
            examples=(
                ("info", "the cards, as wide as the terminal"),
                ("info -w", "again and again, until Ctrl-C"),
                ("info -o json", "a list with an object for each card"),
            ),
            takes=_watch,
        ),
        Command(
            name="allocations",
            summary="which container holds which device",
            about="Asks the kubelet (its pod-resources API) which containers hold NPUs, by the "
            "device plugin or by a ResourceClaim. It needs root.",
            examples=(
                ("allocations", "a line for each device"),
                ("allocations -w", "again and again, until Ctrl-C"),
                ("allocations -o yaml", "for programs"),
            ),
            takes=_allocations,
        ),
        Command(
            name="labels",
            summary="show the labels of the Node and why; apply them once; clear them",
            about="What this host's cards say about the labels of its Node. The running agent "
            "keeps them; apply and clear do it once, by hand, and need NODE_NAME and the API "
            "server. While something that may be a card cannot be read, apply changes none that "
            "are there: exit code 1.",
            usage="[show|apply|clear] [options]",
            examples=(
                ("labels", "every label, its value, and why"),
                ("labels apply", "put them on the Node now"),
                ("labels clear", "remove all of our labels, as before an uninstallation"),
            ),
            takes=_labels,
            configures=_AS_RUN,
        ),
        Command(
            name="config check",
            summary="is this file good? exit 2 if not",
            about="Checks a configuration file, and shows everything that is wrong with it: line, "
            "key, and what would be right.",
            usage="FILE [options]",
            examples=(("config check config.yaml", "exit code 0, or 2 with every error"),),
            takes=_check,
        ),
        Command(
            name="config show",
            summary="the configuration that `run` would have with these options",
            about="Shows every key with its value, and who set it: a line of the file, an option, "
            "or the default. What it prints is a configuration file.",
            examples=(
                ("config show --config-file config.yaml", "what is in force with this file"),
                ("config show --default-pe Single", "and with this option"),
            ),
            configures=_AS_RUN,
        ),
        Command(
            name="config schema",
            summary="the JSON schema of the file",
            about="Prints the JSON schema of the configuration file, for editors.",
            examples=(("config schema > schema.json", ""),),
        ),
        Command(
            name="doctor",
            summary="check what the agent needs, here and in the cluster; exit 1 if something is "
            "wrong",
            about="Checks what the agent needs on this host and in this cluster, changes nothing, "
            "and says first what to fix, in which order and how. Exit code 1 if anything is wrong. "
            "docs/doctor.md has every line.",
            examples=(
                ("doctor", "on the host, as root"),
                (
                    "doctor --config-file=/etc/npu-agent/config.yaml --host-root=/host",
                    "in the agent's Pod",
                ),
                ("doctor --all", "with what follows from other lines, or does not apply"),
            ),
            takes=_doctor,
            configures=_AS_RUN,
        ),
        Command(
            name="verify",
            summary="in a container that was given NPUs: are they the right ones? exit 1 if not",
            about="Checks, in a container, that the NPUs which it was granted are there, can be "
            "opened, and are the only ones. Exit code 1 if anything is wrong. Run it before the "
            "workload: opening a core takes it for that moment.",
            examples=(
                ("verify", "a line for each finding"),
                ("verify --expect 2", "fails unless two devices were given"),
            ),
            takes=_verify,
        ),
        Command(
            name="cdi",
            summary="CDI specs for Docker, Podman and others, on a host without Kubernetes",
            about="Writes CDI specs to /etc/cdi, so that container runtimes start containers with "
            "cards by name, and prints the names. docs/without-kubernetes.md has more.",
            usage="[generate|watch] [options]",
            examples=(
                ("cdi", "write them, as root, and list the names"),
                ("cdi generate --stdout", "print them"),
                ("cdi watch", "and keep them true while cards fail, come and go"),
            ),
            takes=_cdi,
        ),
        Command(
            name="simulate",
            summary="make a simulated driver tree, or break a card in one",
            about="Makes the files of a driver with simulated cards below ROOT, and keeps them "
            "alive until Ctrl-C. Any command reads them with --host-root ROOT. ROOT is made if it "
            "is missing; one that holds other things is refused, so that nothing is lost.",
            usage="ROOT [--cards LIST] [--once]\nROOT fault CARD FAULT\nROOT status",
            examples=(
                ("simulate /tmp/host", "until Ctrl-C"),
                ("simulate /tmp/host fault npu0 dead", "break a card; `ok` repairs it"),
                ("simulate /tmp/host status", "the cards, and what is wrong with them"),
            ),
            takes=_simulate,
        ),
        Command(
            name="demo",
            summary="the whole agent on simulated cards, in this terminal",
            about="Runs the whole agent on simulated cards with a stand-in for the kubelet: no "
            "cluster, no NPU and no root needed. It shows each step, and stays up until Ctrl-C.",
            examples=(("demo", "the tour"), ("demo --once", "end after it")),
            takes=_demo,
        ),
        Command(
            name="completion",
            summary="completion of commands and options for bash, zsh or fish",
            about="Prints a script that completes npu-agent's commands, options and values.",
            usage="bash|zsh|fish",
            examples=(
                ("completion bash > /etc/bash_completion.d/npu-agent", "for all users"),
                ("completion zsh > ~/.zfunc/_npu-agent", "in a directory of fpath"),
                ("completion fish > ~/.config/fish/completions/npu-agent.fish", ""),
            ),
            takes=_completion,
        ),
        Command(
            name="version",
            summary="the version of npu-agent",
            about="Prints the version; --version does so, too.",
            examples=(("version", ""), ("version -o json", "with the version of Python")),
            takes=_output,
        ),
    )
}
"""By name, in the order of the help."""

GROUPS = {"config": "check, show or describe the configuration"}
"""Commands that have others below them."""


def below(group: str) -> dict[str, str]:
    """The commands below a group, or at the top (""), each with a few words."""
    prefix = f"{group} " if group else ""
    found: dict[str, str] = {}
    for name, command in COMMANDS.items():
        first, _, second = name.removeprefix(prefix).partition(" ")
        if name.startswith(prefix):
            found.setdefault(first, GROUPS[first] if second else command.summary)
    return found


def top() -> Parser:
    """What parses what stands before the command."""
    makers = " and ".join(vendor.profile.title for vendor in VENDORS)
    made = Parser(
        "npu-agent",
        usage="[options] COMMAND ...",
        about=f"Node agent for {makers} NPUs on Kubernetes. `npu-agent COMMAND --help` has more on "
        "a command.",
        commands=below(""),
        examples=(
            ("npu-agent demo", "see everything, without a cluster and without an NPU"),
            ("npu-agent info", "the cards of this host"),
            ("npu-agent doctor", "what is wrong here, and how to fix it"),
        ),
    )
    made.add(
        "options",
        "--version",
        action="version",
        version=f"npu-agent {__version__}",
        help="show the version, and end",
    )
    add_common(made, folded=False)
    return made


def group(name: str) -> Parser:
    """What answers for a command that only has others below it."""
    return Parser(
        f"npu-agent {name}",
        usage="COMMAND ...",
        about=f"{GROUPS[name].capitalize()}.",
        commands=below(name),
    )
