"""`npu-agent allocations`: which container holds which device."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict

from npu_agent.commands import CommandError, view
from npu_agent.commands.common import quiet
from npu_agent.commands.screen import Screen, is_screen, run_until_signal
from npu_agent.core.ledger import Assignment
from npu_agent.kubelet import podresources
from npu_agent.vendors import DRIVERS

_REFRESH = 2.0
"""Seconds between two questions to the kubelet with --watch; it says nothing by itself."""


def main(args: argparse.Namespace) -> int:
    """Asks the kubelet once, or with --watch again and again."""
    quiet(args)
    if args.watch:
        return run_until_signal(_watch(args))
    asyncio.run(_once(args))
    return 0


async def _once(args: argparse.Namespace) -> None:
    print(_shown(args, await _held(args)))


async def _watch(args: argparse.Namespace) -> None:
    full = args.output not in view.DATA and is_screen()
    with Screen("npu-agent allocations") if full else nullcontext() as screen:
        before: Sequence[Assignment] | None = None
        while True:
            held = await _held(args)
            if screen:
                screen.draw(_shown(args, held))
            elif held != before:
                print(_shown(args, held), flush=True)
            before = held
            await asyncio.sleep(_REFRESH)


async def _held(args: argparse.Namespace) -> Sequence[Assignment]:
    try:
        return await podresources.fetch(podresources.socket_beside(args.plugin_dir), DRIVERS)
    except podresources.UnavailableError as error:
        raise CommandError(str(error)) from error


def _shown(args: argparse.Namespace, held: Sequence[Assignment]) -> str:
    """Of --watch JSON is a line, and YAML one of several documents."""
    if args.output in view.DATA:
        rows = [{**asdict(one), "claim": one.claim or None} for one in held]
        if not args.watch:
            return view.data(rows, args.output)
        return json.dumps(rows) if args.output == "json" else f"---\n{view.data(rows, 'yaml')}"
    if not held:
        return "no container holds a device"
    return view.drawn(view.assignments_table(held), wide=args.output == "wide")
