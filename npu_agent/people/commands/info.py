"""`npu-agent info`: the cards of this host."""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from npu_agent.cli.common import host_root, quiet, vendors
from npu_agent.config import Config
from npu_agent.core.hardware import Snapshot
from npu_agent.core.ledger import Assignment
from npu_agent.inventory.inventory import read_once
from npu_agent.kubelet import podresources
from npu_agent.kubelet.cordons import last_cordons
from npu_agent.kubelet.podresources import UnavailableError, socket_beside
from npu_agent.people.commands import view
from npu_agent.people.commands.screen import run_until_signal, watch_cards
from npu_agent.vendors import DRIVERS


def main(args: argparse.Namespace) -> int:
    """Shows them once, or with --watch at every change."""
    quiet(args)
    if args.watch:
        return run_until_signal(watch_cards(args, partial(_shown, args)))
    asyncio.run(_once(args))
    return 0


async def _once(args: argparse.Namespace) -> None:
    snapshot = await read_once(vendors(args), load=args.output != "table")
    if view.is_data(args) or args.no_headers:
        for note in view.remarks(snapshot):
            print(f"npu-agent: {note}", file=sys.stderr)
    print(await _shown(args, snapshot))


async def _shown(args: argparse.Namespace, snapshot: Snapshot) -> str:
    return _text(args, snapshot, await _assignments())


async def _assignments() -> tuple[Assignment, ...] | None:
    try:
        return await podresources.fetch(socket_beside(Path(Config().plugin_dir)), DRIVERS)
    except UnavailableError:
        return None  # no kubelet here, or not ours to ask: the column is left out


def _text(args: argparse.Namespace, snapshot: Snapshot, held: tuple[Assignment, ...] | None) -> str:
    cordons = last_cordons(Path(Config().plugin_dir), snapshot).cards
    if view.is_data(args):
        return view.data(view.cards_as_json(snapshot, held, cordons), args)
    wide = args.output == "wide"
    notes = [] if args.no_headers else view.remarks(snapshot)
    if not snapshot.cards:
        demo = "npu-agent demo shows the agent on simulated ones"
        return view.drawn(f"no NPUs found below {host_root(args)}: {demo}", *notes)
    width = None if wide else view.terminal_width()
    table = view.cards_table(snapshot, held, cordons=cordons, wide=wide, width=width)
    return view.drawn(table, *notes, wide=wide, headers=not args.no_headers)
