"""The command line: the parser; each command is a module of `npu_agent.commands`.

It is imported when it is run, so that `--help` is quick and `run` stays small.
Exit codes: 0 fine, 1 failed, 2 wrong use or wrong config.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from npu_agent import __version__, config
from npu_agent.commands import FAILED
from npu_agent.vendors import VENDORS, WORDS

WRONG = 2
"""Exit code of wrong use or a wrong configuration."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (default: the process's) name; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    args = _parser(given).parse_args(given)
    try:
        code: int = import_module(f"npu_agent.commands.{args.command}").main(args)
        sys.stdout.flush()
    except config.ConfigError as error:
        print(f"npu-agent: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return 128 + 2
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for the arguments `given`, which decide whether the simulator is needed."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--host-root",
        type=Path,
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="where the host's / is mounted, or a simulated tree (default: /)",
    )
    # Two of the config's options go with any command; `run` and `config show` bring them along.
    logging = argparse.ArgumentParser(add_help=False)
    config.add_options(logging, WORDS, group="log")

    makers = " and ".join(vendor.profile.title for vendor in VENDORS)
    parser = argparse.ArgumentParser(
        prog="npu-agent",
        description=f"Node agent for {makers} NPUs on Kubernetes.",
        parents=[common, logging],
    )
    parser.add_argument("--version", action="version", version=f"npu-agent {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser("run", parents=[common], help="the agent: what the DaemonSet runs")
    config.add_options(run, WORDS)
    run.add_argument(
        "--no-kubelet",
        dest="kubelet",
        action="store_false",
        help="on a host without Kubernetes: health, metrics, the status page, and CDI specs in "
        "/etc/cdi, as `npu-agent cdi watch` writes them; no Pods, labels or events",
    )
    run.set_defaults(command="run")

    both = [common, logging]
    info = commands.add_parser("info", parents=both, help="the cards of this host")
    info.add_argument("--format", choices=("table", "json"), default="table")
    info.add_argument("--watch", action="store_true", help="go on and show every change")
    info.set_defaults(command="info")

    held = commands.add_parser(
        "allocations", parents=both, help="which container holds which device"
    )
    held.add_argument("--format", choices=("table", "json"), default="table")
    held.add_argument(
        "--plugin-dir",
        type=Path,
        default=Path(config.Config().plugin_dir),
        metavar="DIR",
        help="the kubelet's device-plugins directory; its pod-resources directory is beside it "
        "(default: %(default)s)",
    )
    held.set_defaults(command="allocations")

    labels = commands.add_parser(
        "labels",
        parents=[common],
        help="show the labels of the Node and why; apply them once; clear them",
    )
    labels.add_argument(
        "action", choices=("show", "apply", "clear"), nargs="?", default="show", help="(show)"
    )
    config.add_options(labels, WORDS)
    labels.set_defaults(command="labels")

    conf = commands.add_parser("config", help="check, show or describe the configuration")
    about = conf.add_subparsers(metavar="check|show|schema", required=True)
    check = about.add_parser("check", parents=both, help="is this file good? exit 2 if not")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(command="config", action="check")
    show = about.add_parser(
        "show", parents=[common], help="the configuration that `run` would have with these options"
    )
    config.add_options(show, WORDS)
    show.set_defaults(command="config", action="show")
    schema = about.add_parser("schema", parents=both, help="the JSON schema of the file")
    schema.set_defaults(command="config", action="schema")

    cdi = commands.add_parser(
        "cdi",
        parents=both,
        help="CDI specs in /etc/cdi, for Docker, Podman and others on a host without Kubernetes",
    )
    cdi.add_argument(
        "action",
        choices=("generate", "watch"),
        nargs="?",
        default="generate",
        help="generate: write them once; watch: go on and keep them true to the cards (generate)",
    )
    cdi.add_argument(
        "--stdout", action="store_true", help="with generate: print the specs and write nothing"
    )
    cdi.set_defaults(command="cdi")

    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="check what the agent needs, here and in the cluster; exit 1 if something is wrong",
    )
    doctor.add_argument("--format", choices=("table", "json"), default="table")
    config.add_options(doctor, WORDS)
    doctor.set_defaults(command="doctor")

    verify = commands.add_parser(
        "verify",
        parents=both,
        help="in a container that was given NPUs: are they the right ones? exit 1 if not",
    )
    verify.add_argument("--format", choices=("text", "json"), default="text")
    verify.add_argument(
        "--expect", type=int, metavar="N", help="how many devices the container asked for"
    )
    verify.set_defaults(command="verify")

    simulate = commands.add_parser(
        "simulate", parents=both, help="make a simulated driver tree, or break a card in one"
    )
    if "simulate" in given:  # its help lists the faults, which the simulator knows
        import_module("npu_agent.commands.simulate").add_arguments(simulate)
    simulate.set_defaults(command="simulate")

    demo = commands.add_parser(
        "demo", parents=both, help="the whole agent on simulated cards, in this terminal"
    )
    demo.add_argument("--once", action="store_true", help="end after the tour; exit 1 if it failed")
    demo.set_defaults(command="demo")
    return parser
