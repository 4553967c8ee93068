"""`npu-agent info`: the cards of this host."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from npu_agent.cli import host_root
from npu_agent.config import Config
from npu_agent.core.hardware import CardState, Health, HealthState, Snapshot
from npu_agent.core.ledger import Assignment
from npu_agent.core.trends import Trends
from npu_agent.kubelet import podresources
from npu_agent.kubelet.cordons import last_cordons
from npu_agent.kubelet.podresources import UnavailableError, socket_beside
from npu_agent.people import running
from npu_agent.people.cards import at_one_moment, completed_by, has_loads, read_once
from npu_agent.people.commands import view
from npu_agent.people.commands.common import plugin_dir, probe_settings, quiet, vendor
from npu_agent.people.commands.screen import run_until_signal, watch_cards
from npu_agent.people.processes import Users, users
from npu_agent.people.report import Report, ReportedCard
from npu_agent.text import one_line
from npu_agent.threads import DaemonThread
from npu_agent.vendors import DRA

_ANSWER = 2.0
"""Seconds for the running agent's answer."""


def main(args: argparse.Namespace) -> int:
    """Shows them once, or with --watch at every change."""
    wanted = quiet(args)
    directory = plugin_dir(args, wanted)

    async def watched(snapshot: Snapshot, trends: Trends) -> str:
        return await _shown(args, directory, snapshot, view.described(trends))

    if args.watch:
        return run_until_signal(watch_cards(args, wanted, watched))
    asyncio.run(_once(args, wanted, directory))
    return 0


async def _once(args: argparse.Namespace, wanted: Config, directory: Path) -> None:
    address, _ = running.addresses(wanted.metrics)
    settings = probe_settings(args, wanted)
    snapshot, report = await asyncio.gather(
        read_once(vendor(args), settings=settings), running.status(address, _ANSWER)
    )
    report = report or Report(cards=())
    snapshot, reported = as_reported(snapshot, report)
    if not has_loads(snapshot):
        again = await read_once(vendor(args), load=True, settings=settings)
        snapshot, reported = as_reported(again, report)
    shown = view.described(at_one_moment(snapshot, settings.policy))
    warnings = {card.id: reported[card.id] or shown.get(card.id, []) for card in snapshot.cards}
    if view.is_data(args) or args.no_headers:
        for note in view.notes(snapshot):
            print(f"npu-agent: {note}", file=sys.stderr)
    print(await _shown(args, directory, snapshot, warnings))


def as_reported(snapshot: Snapshot, report: Report) -> tuple[Snapshot, dict[str, list[str]]]:
    """Returns the cards with what the running agent alone knows: one read does not show it.

    Any process may answer in its place, so no card gets better by it; warnings by the card's ID.
    """
    reported = {card.id: card for card in report.cards}
    cards = tuple(
        _as_reported(state, reported[state.id]) if state.id in reported else state
        for state in snapshot.cards
    )
    warnings = {
        state.id: [
            one_line(problem.text) for problem in report.problems if state.id in problem.cards
        ]
        if state.health.state is not HealthState.UNHEALTHY
        else []
        for state in cards
    }
    return replace(snapshot, cards=cards), warnings


def _as_reported(state: CardState, card: ReportedCard) -> CardState:
    """Returns the card with the load of cores that one read does not show, or as unhealthy."""
    health = state.health
    reading = state.reading
    if card.health.state == "unhealthy" and health.state is not HealthState.UNHEALTHY:
        reason = one_line(card.health.reason)
        health = Health(state=HealthState.UNHEALTHY, reason=reason, since=health.since)
    if reading and card.reading:
        loads = {core.core: core.utilization for core in card.reading.cores}
        reading = completed_by(reading, loads)
    return replace(state, health=health, reading=reading)


async def _shown(
    args: argparse.Namespace,
    directory: Path,
    snapshot: Snapshot,
    warnings: Mapping[str, Sequence[str]],
) -> str:
    held = await _assignments(directory)
    cordons = last_cordons(directory, snapshot).cards

    processes = None if held is not None else await _users(host_root(args), snapshot)
    cards = view.cards_as_json(snapshot, held, cordons, warnings, processes)
    if view.is_data(args):
        return view.data(cards, args)
    wide = args.output == "wide"
    notes = [] if args.no_headers else [view.totals(cards), *view.notes(snapshot)]
    if not snapshot.cards:
        demo = "npu-agent demo shows the agent on simulated ones"
        return view.drawn(f"no NPUs found below {host_root(args)}: {demo}", *notes[1:])
    table = view.cards_table(
        snapshot, held, cordons=cordons, warnings=warnings, users=processes, wide=wide
    )
    if processes and processes.hidden and notes:
        notes.append("processes: this user does not see the files of all of them; root does")
    return view.drawn(table, *notes, wide=wide, headers=not args.no_headers)


async def _users(root: Path, snapshot: Snapshot) -> Users | None:
    try:
        return await DaemonThread().call(partial(users, root, snapshot.cards), deadline=_ANSWER)
    except TimeoutError:
        return None  # the kernel may block a read about a process that hangs


async def _assignments(directory: Path) -> tuple[Assignment, ...] | None:
    try:
        return await podresources.fetch(socket_beside(directory), DRA.driver)
    except UnavailableError:
        return None  # no kubelet here, or not ours to ask: the column is left out
