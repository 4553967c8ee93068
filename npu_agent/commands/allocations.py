"""`npu-agent allocations`: which container holds which device."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict
from functools import partial

from npu_agent.commands import CommandError, view
from npu_agent.commands.common import quiet
from npu_agent.commands.screen import run_until_signal, watch
from npu_agent.kubelet import podresources
from npu_agent.vendors import DRIVERS


def main(args: argparse.Namespace) -> int:
    quiet(args)
    if args.watch:
        return run_until_signal(watch(args, partial(_text, args)))
    print(asyncio.run(_text(args)))
    return 0


async def _text(args: argparse.Namespace) -> str:
    try:
        held = await podresources.fetch(podresources.socket_beside(args.plugin_dir), DRIVERS)
    except podresources.UnavailableError as error:
        raise CommandError(str(error)) from error
    if view.is_data(args):
        return view.data([{**asdict(one), "claim": one.claim or None} for one in held], args)
    if not held:
        return "no container holds a device"
    table = view.assignments_table(held)
    return view.drawn(table, wide=args.output == "wide", headers=not args.no_headers)
