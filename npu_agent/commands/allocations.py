"""`npu-agent allocations`: which container holds which device."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict

from npu_agent.commands import CommandError, view
from npu_agent.commands.common import DRIVERS, quiet
from npu_agent.kubelet import podresources


def main(args: argparse.Namespace) -> int:
    """Asks the kubelet once."""
    quiet(args)
    try:
        socket = podresources.socket_beside(args.plugin_dir)
        held = asyncio.run(podresources.fetch(socket, DRIVERS))
    except podresources.UnavailableError as error:
        raise CommandError(str(error)) from error
    if args.output in view.DATA:
        rows = [{**asdict(one), "claim": one.claim or None} for one in held]
        print(view.data(rows, args.output))
    elif held:
        view.show(view.assignments_table(held), wide=args.output == "wide")
    else:
        view.show("no container holds a device")
    return 0
