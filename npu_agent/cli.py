"""The command line: each subcommand is a thin call into a room of the package.

Rooms are imported by the command that needs them, so that `--help` is quick and `run` stays small.
Exit codes: 0 fine, 1 failed, 2 wrong use or wrong config.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from npu_agent import __version__, config, logs
from npu_agent.vendors.furiosa.families import widths

if TYPE_CHECKING:
    from npu_agent.core.ledger import Assignment

FAILED, WRONG = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` (default: the process's) name; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    args = _parser(given).parse_args(given)
    try:
        code: int = args.command(args)
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
    """The parser for the arguments `given`, which tell whether the simulator is needed."""
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
    config.add_options(logging, group="log")

    parser = argparse.ArgumentParser(
        prog="npu-agent",
        description="Node agent for FuriosaAI NPUs on Kubernetes.",
        parents=[common, logging],
    )
    parser.add_argument("--version", action="version", version=f"npu-agent {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser("run", parents=[common], help="the agent: what the DaemonSet runs")
    config.add_options(run)
    run.set_defaults(command=_run)

    both = [common, logging]
    info = commands.add_parser("info", parents=both, help="the cards of this host")
    info.add_argument("--format", choices=("table", "json"), default="table")
    info.add_argument("--watch", action="store_true", help="go on and show every change")
    info.set_defaults(command=_info)

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
    held.set_defaults(command=_allocations)

    labels = commands.add_parser(
        "labels",
        parents=[common],
        help="what would be put on the Node and why; put it there once; take all of ours away",
    )
    labels.add_argument(
        "action", choices=("show", "apply", "clear"), nargs="?", default="show", help="(show)"
    )
    config.add_options(labels)
    labels.set_defaults(command=_labels)

    conf = commands.add_parser("config", help="check, show or describe the configuration")
    about = conf.add_subparsers(metavar="check|show|schema", required=True)
    check = about.add_parser("check", parents=both, help="is this file good? exit 2 if not")
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(command=_config_check)
    show = about.add_parser(
        "show", parents=[common], help="the configuration that `run` would have with these options"
    )
    config.add_options(show)
    show.set_defaults(command=_config_show)
    schema = about.add_parser("schema", parents=both, help="the JSON schema of the file")
    schema.set_defaults(command=_config_schema)

    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        help="is all there that the agent needs, here and in the cluster? exit 1 if not",
    )
    doctor.add_argument("--format", choices=("table", "json"), default="table")
    config.add_options(doctor)
    doctor.set_defaults(command=_doctor)

    verify = commands.add_parser(
        "verify",
        parents=both,
        help="in a container that was given NPUs: has it what it was promised? exit 1 if not",
    )
    verify.add_argument("--format", choices=("text", "json"), default="text")
    verify.add_argument(
        "--expect", type=int, metavar="N", help="how many devices the container asked for"
    )
    verify.set_defaults(command=_verify)

    simulate = commands.add_parser(
        "simulate", parents=both, help="make a simulated driver tree, or break a card in one"
    )
    if "simulate" in given:
        from npu_agent.simulator import command as simulator

        simulator.add_arguments(simulate)
        simulate.set_defaults(command=simulator.main)

    demo = commands.add_parser(
        "demo", parents=both, help="the whole agent on simulated cards, in this terminal"
    )
    demo.add_argument("--once", action="store_true", help="end after the tour; exit 1 if it failed")
    demo.set_defaults(command=_demo)
    return parser


def _host_root(args: argparse.Namespace) -> Path:
    root: Path = getattr(args, "host_root", Path("/"))
    return root


def _effective(args: argparse.Namespace) -> config.Effective:
    """The configuration that the options ask for; sets logging up by it."""
    effective = config.from_args(args, widths())
    logs.setup(effective.config.log.level, effective.config.log.format)
    return effective


def _quiet(args: argparse.Namespace) -> None:
    """Logging of the commands for people: only what is wrong, unless they ask for more."""
    log = config.from_args(args, widths())
    default = log.origins["log.level"] == "default"
    logs.setup("error" if default else log.config.log.level, log.config.log.format)


def _run(args: argparse.Namespace) -> int:
    # The first process of a container has no default for SIGTERM: without this, an agent that is
    # ended while it still imports would be waited for until it is killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from npu_agent import agent

    effective = _effective(args)
    asyncio.run(
        agent.run(
            effective,
            host_root=_host_root(args),
            node_name=os.environ.get("NODE_NAME") or None,
            config_file=getattr(args, "config_file", None),
        )
    )
    return 0


def _info(args: argparse.Namespace) -> int:
    from npu_agent.commands import view
    from npu_agent.core.hardware import Snapshot
    from npu_agent.inventory.inventory import Inventory, read_once
    from npu_agent.kubelet import podresources as assignments
    from npu_agent.vendors.furiosa.sysfs import Furiosa

    _quiet(args)
    vendors = [Furiosa(_host_root(args))]
    pod_resources = assignments.socket_beside(Path(config.Config().plugin_dir))

    async def pods() -> tuple[Assignment, ...]:
        try:
            return await assignments.fetch(pod_resources)
        except assignments.UnavailableError:
            return ()  # no kubelet here, or not ours to ask: the column is left out

    def show(snapshot: Snapshot, held: tuple[Assignment, ...]) -> None:
        if args.format == "json":
            print(json.dumps(view.cards_as_json(snapshot), indent=None if args.watch else 2))
            return
        notes = [f"not served: {odd.entry}: {odd.reason}" for odd in snapshot.odd]
        if snapshot.cards:
            view.show(view.cards_table(snapshot, held), *notes)
        else:
            view.show(f"no NPUs found below {_host_root(args)}", *notes)

    async def once() -> None:
        show(await read_once(vendors), await pods())

    async def watch() -> None:
        # Not asyncio's own Ctrl-C, which cancels between any two instructions and so may break
        # into the work of an event (seen: InvalidStateError).
        this = asyncio.current_task()
        assert this is not None  # noqa: S101  (for the type checker)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, this.cancel)
        inventory = Inventory(vendors)
        # No TaskGroup: it would wrap the BrokenPipeError that `main` knows how to take.
        running = asyncio.create_task(inventory.run())
        running.add_done_callback(lambda _: inventory.snapshots.close())
        try:
            async for snapshot in inventory.snapshots.watch():
                if snapshot.complete:
                    held = await pods()
                    if args.format == "table" and sys.stdout.isatty():
                        print("\033[H\033[2J", end="")
                    show(snapshot, held)
                    sys.stdout.flush()
            await running
        finally:
            running.cancel()

    try:
        asyncio.run(watch() if args.watch else once())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return 0


def _allocations(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from npu_agent.commands import view
    from npu_agent.kubelet import podresources as assignments

    _quiet(args)
    socket = assignments.socket_beside(args.plugin_dir)
    try:
        held = asyncio.run(assignments.fetch(socket))
    except assignments.UnavailableError as error:
        print(f"npu-agent: {error}", file=sys.stderr)
        return FAILED
    if args.format == "json":
        print(json.dumps([asdict(one) for one in held], indent=2))
    elif held:
        view.show(view.assignments_table(held))
    else:
        view.show("no container holds a device")
    return 0


def _labels(args: argparse.Namespace) -> int:
    from npu_agent.commands import view
    from npu_agent.inventory.inventory import read_once
    from npu_agent.kube import Api
    from npu_agent.outputs.labels import compute, output_of
    from npu_agent.outputs.labels.labeller import UnavailableError
    from npu_agent.outputs.labels.machine import read_machine
    from npu_agent.vendors.furiosa.sysfs import Furiosa

    _quiet(args)
    wanted = config.from_args(args, widths()).config.labels
    root = _host_root(args)

    async def act() -> int:
        api = Api()
        try:
            output = output_of(
                wanted.output, api=api, node_name=os.environ.get("NODE_NAME"), host_root=root
            ) or output_of("api", api=api, node_name=os.environ.get("NODE_NAME"), host_root=root)
            assert output is not None  # noqa: S101  (for the type checker)
            if args.action == "clear":
                cleared = await output.clear()
                print(*sorted(cleared) or ["nothing to clear"], sep="\n")
                return 0
            snapshot = await read_once([Furiosa(root)])
            machine = read_machine(root)
            if args.action == "show":
                view.show(view.labels_table(compute.explained(snapshot, machine, wanted.sets)))
            else:
                labels = compute.labels(snapshot, machine, wanted.sets)
                await output.put(labels, careful=False)
                print(*(f"{key}={value}" for key, value in labels.items()), sep="\n")
            if doubt := compute.unsure(snapshot):
                print(f"npu-agent: these may not be all: {doubt}", file=sys.stderr)
        except UnavailableError as error:
            print(f"npu-agent: {error}", file=sys.stderr)
            return FAILED
        finally:
            await api.close()
        return 0

    return asyncio.run(act())


def _config_check(args: argparse.Namespace) -> int:
    config.load(args.file, widths())
    print(f"{args.file}: good")
    return 0


def _config_show(args: argparse.Namespace) -> int:
    print(config.show(config.from_args(args, widths())), end="")
    return 0


def _config_schema(args: argparse.Namespace) -> int:  # noqa: ARG001 (one shape for all commands)
    print(json.dumps(config.json_schema(), indent=2))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from npu_agent.commands import view
    from npu_agent.doctor import report
    from npu_agent.doctor.examine import examine
    from npu_agent.doctor.situation import Situation, configuration, forgotten

    wanted, good = configuration(args)
    # The file's level is the agent's: here it would mix the looks' own log with the lines.
    asked = "config.log.level" in vars(args)
    logs.setup(wanted.log.level if asked else "error", wanted.log.format)
    situation = Situation.here(wanted, _host_root(args))

    async def act() -> int:
        checks = (forgotten(situation, good), *await examine(situation))
        # Shown here: what hangs after all, such as a name that is resolved, may hold up the end.
        if args.format == "json":
            print(report.as_json(checks))
        else:
            view.show(report.table(checks, narrow=sys.stdout.isatty()), report.summary(checks))
        sys.stdout.flush()
        return FAILED if report.failed(checks) else 0

    return asyncio.run(act())


def _verify(args: argparse.Namespace) -> int:
    from npu_agent.commands import verify
    from npu_agent.doctor import report

    _quiet(args)
    checks = asyncio.run(verify.verify(_host_root(args), os.environ, expect=args.expect))
    print(report.as_json(checks) if args.format == "json" else verify.text(checks))
    return FAILED if report.failed(checks) else 0


def _demo(args: argparse.Namespace) -> int:
    from npu_agent.commands import demo

    return asyncio.run(demo.run(once=args.once))
