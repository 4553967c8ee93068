"""`npu-agent info`: the cards of this host."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from npu_agent.commands import view
from npu_agent.commands.common import host_root, quiet, vendors
from npu_agent.commands.screen import Screen, is_screen, run_until_signal
from npu_agent.config import Config
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment
from npu_agent.inventory.inventory import Inventory, read_once
from npu_agent.kubelet import podresources
from npu_agent.kubelet.podresources import UnavailableError, socket_beside
from npu_agent.ticks import set_within
from npu_agent.vendors import DRIVERS

_REFRESH = 2.0
"""Seconds after which the screen is drawn again, with the time and the Pods, without a change."""


def main(args: argparse.Namespace) -> int:
    """Shows them once, or with --watch at every change."""
    quiet(args)
    if args.watch:
        return run_until_signal(_watch(args))
    asyncio.run(_once(args))
    return 0


async def _once(args: argparse.Namespace) -> None:
    snapshot, held = await read_once(vendors(args)), await _assignments()
    if args.output in view.DATA:
        for note in view.not_served(snapshot):
            print(f"npu-agent: {note}", file=sys.stderr)
        print(view.data(view.cards_as_json(snapshot, held), args.output))
    else:
        print(_table(args, snapshot, held))


async def _watch(args: argparse.Namespace) -> None:
    inventory = Inventory(vendors(args))
    snapshots = inventory.snapshots
    # No TaskGroup: it would wrap the BrokenPipeError that `cli.main` handles.
    running = asyncio.create_task(inventory.run())
    running.add_done_callback(lambda _: snapshots.close())
    full = args.output not in view.DATA and is_screen()
    try:
        with Screen("npu-agent info") if full else nullcontext() as screen:
            shown: Snapshot | None = None
            while not snapshots.closed:
                changed, snapshot = snapshots.changed, snapshots.value
                if snapshot.complete and (screen or snapshot is not shown):
                    shown, held = snapshot, await _assignments()
                    if screen:
                        screen.draw(_table(args, snapshot, held))
                    else:
                        print(_one_of_many(args, snapshot, held), flush=True)
                await set_within(changed, _REFRESH if screen else None)
            await running
    finally:
        running.cancel()


def _one_of_many(
    args: argparse.Namespace, snapshot: Snapshot, held: tuple[Assignment, ...] | None
) -> str:
    """What --watch prints for a change: JSON in one line, YAML as one of several documents."""
    match args.output:
        case "json":
            return json.dumps(view.cards_as_json(snapshot, held))
        case "yaml":
            return f"---\n{view.data(view.cards_as_json(snapshot, held), 'yaml')}"
        case _:
            return _table(args, snapshot, held)


async def _assignments() -> tuple[Assignment, ...] | None:
    try:
        return await podresources.fetch(socket_beside(Path(Config().plugin_dir)), DRIVERS)
    except UnavailableError:
        return None  # no kubelet here, or not ours to ask: the column is left out


def _table(
    args: argparse.Namespace, snapshot: Snapshot, held: tuple[Assignment, ...] | None
) -> str:
    wide = args.output == "wide"
    notes = view.not_served(snapshot)
    if not snapshot.cards:
        return view.drawn(f"no NPUs found below {host_root(args)}", *notes)
    width = None if wide else view.terminal_width()
    table = view.cards_table(snapshot, held, wide=wide, width=width)
    return view.drawn(table, *notes, wide=wide)
