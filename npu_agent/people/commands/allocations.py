"""`npu-agent allocations`: which container holds which device."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from npu_agent.cli import CommandError
from npu_agent.core.hardware import Snapshot
from npu_agent.kubelet import podresources
from npu_agent.people.cards import read_once
from npu_agent.people.commands import view
from npu_agent.people.commands.common import plugin_dir, quiet, vendor
from npu_agent.people.commands.screen import run_until_signal, watch_cards
from npu_agent.vendors import DRA


def main(args: argparse.Namespace) -> int:
    configured = quiet(args)
    directory = plugin_dir(args, configured)
    if args.watch:
        return run_until_signal(
            watch_cards(args, configured, lambda snapshot, _: _text(args, directory, snapshot))
        )
    print(asyncio.run(_once(args, directory)))
    return 0


async def _once(args: argparse.Namespace, directory: Path) -> str:
    return await _text(args, directory, await read_once(vendor(args)))


async def _text(args: argparse.Namespace, directory: Path, snapshot: Snapshot) -> str:
    try:
        held = await podresources.fetch(podresources.socket_beside(directory), DRA.driver)
    except podresources.UnavailableError as error:
        raise CommandError(str(error)) from error
    if view.is_data(args):
        return view.data(view.allocations_as_json(snapshot, held), args)
    if not held:
        return "no container holds a device"
    wide = args.output == "wide"
    table = view.allocations_table(snapshot, held, wide=wide)
    return view.drawn(table, wide=wide, headers=not args.no_headers)
