"""`npu-agent doctor`: runs the checks, and shows their results."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterable

from npu_agent import logs
from npu_agent.cli import FAILED
from npu_agent.cli.common import host_root, vendors
from npu_agent.people.cluster.proxy import end_children
from npu_agent.people.commands import view
from npu_agent.people.doctor import report
from npu_agent.people.doctor.check import Check, State
from npu_agent.people.doctor.context import Context, configuration
from npu_agent.people.doctor.examine import examine
from npu_agent.vendors import REGISTRY

NO_NODE = (
    "this host is not an NPU node: no NPU, no driver for one, and no kubelet ({directory} is "
    "missing); on the node itself run `npu-agent doctor` as root, or ask in the agent's Pod "
    "(npu-agent doctor --help); `npu-agent demo` needs neither"
)


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if anything is wrong."""
    wanted, good = configuration(args, REGISTRY)
    # The file's level is the agent's: here it would mix the probes' own log with the lines.
    asked = "config.log.level" in args
    logs.setup(wanted.log.level if asked else "error", wanted.log.format)
    context = Context.here(wanted, host_root(args), vendors(args))

    async def act() -> int:
        checks = (good, *await examine(context))
        if view.is_data(args):
            print(view.data([check.as_json() for check in checks], args))
        elif not args.all and not context.in_pod and no_node(checks):
            print(NO_NODE.format(directory=context.directory))
        else:
            wide = args.output == "wide"
            columns = None if wide else view.terminal_width()
            parts = report.parts(checks, everything=wide or args.all, columns=columns)
            print(view.drawn(*parts, wide=wide))
        # Shown here: what hangs after all, such as a name that is resolved, may delay the end.
        sys.stdout.flush()
        return FAILED if report.failed(checks) else 0

    try:
        return asyncio.run(act())
    finally:
        end_children(os.getpid())  # a login program of the kubeconfig may hang


def no_node(checks: Iterable[Check]) -> bool:
    """Whether this host has nothing to do with NPUs and Kubernetes, such as a laptop."""
    states = {check.name: check.state for check in checks}
    return [states.get(name) for name in ("config", "plugin directory", "PCI", "cards")] == [
        State.OK,
        State.WRONG,
        State.UNUSED,
        State.NOTE,
    ]
