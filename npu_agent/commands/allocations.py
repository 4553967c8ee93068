"""`npu-agent allocations`: which container holds which device."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict

from npu_agent.commands import FAILED, view
from npu_agent.commands.common import quiet
from npu_agent.kubelet import podresources


def main(args: argparse.Namespace) -> int:
    """Asks the kubelet once."""
    quiet(args)
    try:
        held = asyncio.run(podresources.fetch(podresources.socket_beside(args.plugin_dir)))
    except podresources.UnavailableError as error:
        print(f"npu-agent: {error}", file=sys.stderr)
        return FAILED
    if args.format == "json":
        print(json.dumps([asdict(one) for one in held], indent=2))
    else:
        view.show(view.assignments_table(held) if held else "no container holds a device")
    return 0
