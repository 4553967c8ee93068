"""`npu-agent allocations`: which container holds which device."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict

from npu_agent.commands import FAILED, view
from npu_agent.commands.common import DRIVERS, quiet
from npu_agent.kubelet import podresources


def main(args: argparse.Namespace) -> int:
    """Asks the kubelet once."""
    quiet(args)
    try:
        socket = podresources.socket_beside(args.plugin_dir)
        held = asyncio.run(podresources.fetch(socket, DRIVERS))
    except podresources.UnavailableError as error:
        print(f"npu-agent: {error}", file=sys.stderr)
        return FAILED
    if args.format == "json":
        rows = [{**asdict(one), "claim": one.claim or None} for one in held]
        print(json.dumps(rows, indent=2))
    else:
        view.show(view.assignments_table(held) if held else "no container holds a device")
    return 0
