"""`kubectl npu`: the cards of a whole cluster, by a person's kubeconfig and rights.

The executables `kubectl-…` of pyproject.toml are `npu-agent` by other names.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from npu_agent import __version__
from npu_agent.cli import CommandError
from npu_agent.cli.parser import Parser
from npu_agent.core.vendor import LabelSource
from npu_agent.kube import Api, ApiError, ErrorKind
from npu_agent.kube.request import plural
from npu_agent.people.cluster import rows
from npu_agent.people.cluster.fetch import (
    AgentReports,
    agents,
    fetch,
    report_of,
    reports,
    status_of,
)
from npu_agent.people.cluster.objects import AGENT
from npu_agent.people.cluster.proxy import through_kubectl
from npu_agent.people.cluster.why import lines, why
from npu_agent.people.commands import view
from npu_agent.people.commands.screen import run_until_signal, watch
from npu_agent.people.report import ReportedHolder
from npu_agent.text import one_line
from npu_agent.vendors import DRA, SPEC

_RIGHTS = (
    "ask an administrator for the ClusterRole npu-viewer, k8s/examples/npu-viewer.yaml in "
    "npu-agent's repository, and "
    "`kubectl create clusterrolebinding npu-viewer --clusterrole=npu-viewer --user=YOU`"
)
_OF_PODS = ("pods", "claims", "slices", "daemon_sets")
_ALL = ("nodes", *_OF_PODS, "classes", "taint_rules")
WORDS = rows.Words(
    driver=DRA.driver,
    domain=DRA.driver.partition(".")[2],
    cores={
        label.named(family): count
        for labels in SPEC.label_sets.values()
        for label in labels.labels
        if label.source is LabelSource.FAMILY
        for family, count in SPEC.core_counts.items()
    },
)
_NODES = ("node", "cards", "healthy", "cores", "allocated", "free", "widest", "driver", "agent")
_PODS = ("namespace", "pod", "node", "card", "cores", "load", "since", "status")
_TOP = ("load", "namespace", "pod", "node", "card", "cores", "since")
_COMMANDS = {
    "nodes": "The Nodes with NPUs: what is healthy, allocated and free (the default)",
    "pods": "The Pods that hold NPUs, and those that wait: cards, cores, load",
    "node": "What the agent of a Node reports about its cards",
    "why": "What the scheduler says of a Pending Pod, and facts; for a running Pod, its devices",
    "top": "The holders by load, the idle ones first",
    "cordon": "Take one card out of service",
    "uncordon": "Bring it back",
    "drain": "Cordon a card, and evict the Pods that hold it",
    "verify": "Try in a Pod on each Node whether a job can run there, on a card that is free",
}
_CHANGES = ("cordon", "uncordon", "drain")
"""These are commands of `npu-agent`, too."""


def parser() -> Parser:
    """Knows the commands, and their arguments and options."""
    top = Parser(
        prog="kubectl npu",
        description="The NPUs of a cluster, as your kubeconfig and your rights show them.",
        epilog="Examples:\n  kubectl npu\n  kubectl npu pods -A\n  kubectl npu top -A\n"
        "  kubectl npu drain node-1 npu3 --reason=fan\n"
        "  kubectl npu verify --all\n",
    )
    top.add_argument("-V", "--version", action="version", version=f"npu-agent {__version__}")
    _add_login(top)
    _add_listing(top)
    commands = top.add_subparsers(metavar="COMMAND", dest="command")
    top.set_defaults(command="nodes")
    for name, summary in _COMMANDS.items():
        # What stands before the command is not overwritten by defaults.
        command = commands.add_parser(
            name, help=summary, description=summary, argument_default=argparse.SUPPRESS
        )
        command.set_defaults(command=name)
        _add_login(command)
        if name == "verify":
            _add_verify(command)
        elif name in _CHANGES:
            command.add_argument("node", metavar="NODE")
            command.add_argument("npu", metavar="CARD", help="its name, UUID or PCI address")
            if name != "uncordon":
                command.add_argument("--reason", default="", metavar="TEXT", help="for people")
            if name == "drain":
                command.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS")
                command.add_argument("--grace-period", type=int, default=None, metavar="SECONDS")
                command.add_argument("--dry-run", action="store_true", default=False)
        else:
            _add_listing(command)
            if name == "why":
                command.add_argument("pod", metavar="POD")
            if name == "node":
                command.add_argument("node", metavar="NODE")
    return top


def _add_verify(parser: Parser) -> None:
    add = parser.add_argument
    add("node", nargs="*", default=[], metavar="NODE")
    add("--all", action="store_true", default=False, help="each Node with NPUs")
    add("-n", "--namespace", metavar="NAME", help="of the Pods (default: that of the agent)")
    profile = "the Pods' seccomp profile: Unconfined (the default), RuntimeDefault, or the path of "
    profile += "one on the Nodes"
    add("--seccomp", default="Unconfined", metavar="PROFILE", help=profile)
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="of each (default: 60)")
    add("-o", "--output", choices=("table", "json", "yaml"), metavar="FORMAT", help="json or yaml")
    add("--no-headers", action="store_true", help="only the rows")


def _add_login(parser: Parser) -> None:
    add = parser.add_argument
    add("--kubeconfig", type=Path, metavar="FILE", help="in place of $KUBECONFIG")
    add("--context", metavar="NAME", help="of the kubeconfig (default: the current one)")
    add("--as", dest="impersonate", metavar="USER", help="act as another user")
    add("--as-group", dest="groups", action="append", metavar="GROUP", help="may be repeated")


def _add_listing(parser: Parser) -> None:
    add = parser.add_argument
    add("-n", "--namespace", metavar="NAME", help="of Pods (default: that of the context)")
    add("-A", "--all-namespaces", action="store_true", help="Pods of all namespaces")
    outputs = ("table", "wide", "json", "yaml", "name")
    add("-o", "--output", choices=outputs, metavar="FORMAT", help="wide, json, yaml or name")
    add("-w", "--watch", action="store_true", help="go on until q or Ctrl-C")
    add("--no-headers", action="store_true", help="only the rows")
    add("-l", "--selector", metavar="LABELS", help="of Nodes; of Pods for pods and top")


def flags(args: argparse.Namespace) -> tuple[str, ...]:
    """The options that are kubectl's own, for kubectl."""
    given = (
        ("kubeconfig", args.kubeconfig),
        ("context", args.context),
        ("as", args.impersonate),
        *(("as-group", group) for group in args.groups or ()),
    )
    return tuple(f"--{name}={value}" for name, value in given if value)


def main(args: argparse.Namespace) -> int:
    """Runs `kubectl npu`."""
    gc.set_threshold(10**6)  # millions of objects that all stay: to look through them takes seconds
    try:
        args.kubectl = flags(args)
        if args.command in _CHANGES:
            code: int = import_module(f"npu_agent.people.commands.{args.command}").main(args)
            return code
        if args.command == "verify":
            from npu_agent.people.commands import kubectl_verify

            return kubectl_verify.main(args)
        return run_until_signal(_show(args))
    except ApiError as error:
        lacks = error.kind is ErrorKind.FORBIDDEN
        raise CommandError(f"{error.what}: {_RIGHTS}" if lacks else str(error)) from error


async def _show(args: argparse.Namespace) -> None:
    said: set[str] = set()

    async def text() -> str:
        shown, warnings = await _text(api, args)
        for warning in warnings:
            if warning not in said:
                print(f"kubectl npu: {one_line(warning)}", file=sys.stderr)
        said.update(warnings)
        return shown

    async with through_kubectl(flags(args)) as (api, place):
        args.namespace = args.namespace or place.namespace
        if args.watch:
            await watch(args, text)
        else:
            print(await text())


async def _text(api: Api, args: argparse.Namespace) -> tuple[str, list[str]]:
    """Returns the output, and warnings."""
    match args.command:
        case "node":
            return await _node(api, args), []
        case "nodes":
            return await _nodes(api, args)
        case "why":
            return await _why(api, args)
    return await _pods(api, args)


async def _nodes(api: Api, args: argparse.Namespace) -> tuple[str, list[str]]:
    cluster = await fetch(api, "nodes", *_OF_PODS, selectors={"nodes": args.selector})
    nodes = rows.node_rows(cluster, WORDS)
    # Agents are asked for what the objects do not tell.
    unknown = {row.node for row in nodes if row.cards is None} | rows.to_ask(cluster, WORDS)
    running = {node: pods for node, pods in agents(cluster).items() if node in unknown}
    read = AgentReports()
    if running:
        read = await reports(api, running)
        nodes = rows.node_rows(cluster, WORDS, read)
    warnings = [*_refusals(cluster.refused), *cluster.unread, *_unread_reports(read)]
    return _shown(args, nodes, _NODES, _none("no NPUs found", warnings)), warnings


async def _why(api: Api, args: argparse.Namespace) -> tuple[str, list[str]]:
    space = "default" if args.all_namespaces else args.namespace
    name = args.pod.removeprefix("pod/")
    named, own, cluster = await asyncio.gather(
        fetch(api, "pods", namespace=space, pod=name),
        fetch(api, "claims", "templates", namespace=space),
        fetch(api, *_ALL),
    )
    if not named.pods:
        missing = f"there is no Pod {name} in namespace {space}"
        owner = "if none was made, the Events of its Job or ReplicaSet say why (a quota, a policy)"
        raise CommandError(one_line(named.refused.get("Pod") or f"{missing}; {owner}"))
    on = named.pods[0].spec.node_name
    read = await reports(api, {node: pods for node, pods in agents(cluster).items() if node == on})
    answer = why(named.pods[0], own, cluster, WORDS, read)
    unread = dict.fromkeys((*own.unread, *cluster.unread))
    warnings = [*_refusals({**own.refused, **cluster.refused}), *unread, *_unread_reports(read)]
    if view.is_data(args):
        return view.data(asdict(answer), args), warnings
    return lines(answer, each=args.output == "wide"), warnings


async def _pods(api: Api, args: argparse.Namespace) -> tuple[str, list[str]]:
    """Renders `pods` and `top`."""
    space = "" if args.all_namespaces else args.namespace
    cluster, of_agents = await asyncio.gather(
        fetch(api, *_OF_PODS, namespace=space, selectors={"pods": args.selector}),
        fetch(api, "pods", "daemon_sets", selectors={"pods": AGENT}),
    )
    held = rows.holdings(cluster, WORDS, AgentReports())
    running = agents(of_agents)
    nodes = {row.node for row in held if row.node} | rows.to_ask(cluster, WORDS)
    if "" in nodes:  # a Pod that waits for what may be an NPU: an agent whose Node has it knows
        nodes |= rows.to_ask(await fetch(api, "nodes"), WORDS)
    read = await reports(api, {node: pods for node, pods in running.items() if node in nodes})
    held = rows.holdings(cluster, WORDS, read)
    warnings = [
        *_refusals(cluster.refused),
        *cluster.unread,
        *_unread_reports(read),
    ]
    none = _none("no Pod holds an NPU, or waits for one", warnings)
    if args.command == "top":
        return _shown(args, rows.by_idleness(held), _TOP, none), warnings
    return _shown(args, held, _PODS, none), warnings


def _unread_reports(read: AgentReports) -> Iterator[str]:
    if read.refused:
        yield f"you may not read the agents' pages (pods/proxy): {_RIGHTS}"
    if read.failed:
        node, why = min(read.failed.items())
        yield f"{len(read.failed)} pages of agents were not read; of Node {node}: {why}"


def _none(words: str, warnings: Sequence[str]) -> str:
    return f"{words} in what could be read" if warnings else words


def _refusals(refused: Mapping[str, str]) -> list[str]:
    kinds = ", ".join(sorted(map(plural, refused)))
    return [f"you may not list {kinds}: {_RIGHTS}"] if refused else []


def _shown(
    args: argparse.Namespace, items: Sequence[Any], columns: Sequence[str], none: str
) -> str:
    if view.is_data(args):
        return view.data([asdict(row) for row in items], args)
    if args.output == "name":
        kind = "node" if columns is _NODES else "pod"
        return "\n".join(dict.fromkeys(f"{kind}/{one_line(getattr(row, kind))}" for row in items))
    if not items:
        return none
    if args.output == "wide":
        columns = (*columns, "api" if columns is _NODES else "of")
    return table(columns, [[cell(row, name) for name in columns] for row in items], args)


def table(columns: Sequence[str], cells: Sequence[Sequence[str]], args: argparse.Namespace) -> str:
    """Columns as kubectl's: of capitals, three spaces apart."""
    lines = [*([] if args.no_headers else [[name.upper() for name in columns]]), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "   ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def cell(row: Any, name: str) -> str:
    """Formats a value for people; unknown is ``-``."""
    value = getattr(row, name)
    if value is None:
        return "-"
    if name == "load":
        return f"{value:.0f}%"
    return _age(value) if name == "since" else one_line(value, 100)


def _age(since: str) -> str:
    """Formats an age as kubectl does: ``90s``, ``12m``, ``5h``, ``3d``; ``?`` if it is no time."""
    try:
        seconds = int((datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return "?"
    for size, unit, most in ((1, "s", 120), (60, "m", 7200), (3600, "h", 172800)):
        if seconds < most:
            return f"{max(0, seconds) // size}{unit}"
    return f"{seconds // 86400}d"


async def _node(api: Api, args: argparse.Namespace) -> str:
    """Renders a Node's page: cards, holders and problems."""
    if view.is_data(args):
        return view.data(await status_of(api, args.node), args)
    report = await report_of(api, args.node)
    columns = ("card", "family", "cores", "health", "cordoned", "pods")
    cells = [
        [
            one_line(text, 100)
            for text in (
                card.name,
                card.family,
                card.core_count,
                card.health.reason or card.health.state,
                card.cordoned or "-",
                ", ".join(map(_held, card.holders)) or "-",
            )
        ]
        for card in report.cards
    ]
    ready = "ready" if report.ready else "not ready"
    said = [one_line(f"agent {report.version} on Node {report.node}, {ready}")]
    for problem in report.problems:
        said.append(one_line(f"{problem.severity}: {problem.text}"))
        steps = (
            ("", problem.remedy),
            ("$ ", problem.command),
            ("last, as it deletes Pods: $ ", problem.last_command),
        )
        said += [f"  {start}{one_line(text)}" for start, text in steps if text]
    return "\n".join([table(columns, cells, args), "", *said])


def _held(by: ReportedHolder) -> str:
    return f"{by.namespace}/{by.pod}" + (f" ({by.cores})" if by.cores else "")
