"""`npu-agent info`: the cards of this host."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path

from npu_agent.commands import view
from npu_agent.commands.common import DRIVERS, host_root, quiet, vendors
from npu_agent.config import Config
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment
from npu_agent.inventory.inventory import Inventory, read_once
from npu_agent.kubelet import podresources
from npu_agent.kubelet.podresources import UnavailableError, socket_beside


def main(args: argparse.Namespace) -> int:
    """Shows them once, or with --watch at every change."""
    quiet(args)
    try:
        asyncio.run(_watch(args) if args.watch else _once(args))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return 0


async def _once(args: argparse.Namespace) -> None:
    _show(args, await read_once(vendors(args)), await _assignments())


async def _watch(args: argparse.Namespace) -> None:
    # Not asyncio's own Ctrl-C, which cancels between any two instructions and so may break
    # into the work of an event (seen: InvalidStateError).
    this = asyncio.current_task()
    assert this is not None  # noqa: S101  (for the type checker)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, this.cancel)
    inventory = Inventory(vendors(args))
    # No TaskGroup: it would wrap the BrokenPipeError that `cli.main` handles.
    running = asyncio.create_task(inventory.run())
    running.add_done_callback(lambda _: inventory.snapshots.close())
    try:
        async for snapshot in inventory.snapshots.watch():
            if snapshot.complete:
                held = await _assignments()
                if args.format == "table" and sys.stdout.isatty():
                    print("\033[H\033[2J", end="")
                _show(args, snapshot, held)
                sys.stdout.flush()
        await running
    finally:
        running.cancel()


async def _assignments() -> tuple[Assignment, ...]:
    try:
        return await podresources.fetch(socket_beside(Path(Config().plugin_dir)), DRIVERS)
    except UnavailableError:
        return ()  # no kubelet here, or not ours to ask: the column is left out


def _show(args: argparse.Namespace, snapshot: Snapshot, held: tuple[Assignment, ...]) -> None:
    if args.format == "json":
        print(json.dumps(view.cards_as_json(snapshot), indent=None if args.watch else 2))
        return
    notes = [f"not served: {odd.entry}: {odd.reason}" for odd in snapshot.odd]
    if snapshot.cards:
        view.show(view.cards_table(snapshot, held), *notes)
    else:
        view.show(f"no NPUs found below {host_root(args)}", *notes)
