"""Measures the agent as a kubelet, a Prometheus and a node see it, each figure beside its target.

The agent runs as a process of its own on simulated cards, with everything on. The kubelet is the
stand-in of the simulator, the API server one of `bench.apiserver`. A run of everything, and one of
peers, is written into docs/benchmarks.md and the READMEs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator

from bench import (
    against,
    claims,
    hour,
    idle,
    limits,
    packing,
    pages,
    peers,
    plugin,
    report,
    soak,
    view,
)
from bench.figure import HEADER, Figure
from bench.fleet import run


async def main() -> None:
    """Prints the figures as they come, as a table in Markdown."""
    if sys.argv[1:2] == ["fleet"]:
        await run.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--idle", type=float, metavar="SECONDS", help="default: 20; of peers 10")
    parser.add_argument(
        "--soak",
        type=float,
        nargs="?",
        const=10.0,
        metavar="MINUTES",
        help="instead: everything at once for so long (10), and whether anything grows",
    )
    parser.add_argument(
        "--hour",
        type=float,
        nargs="?",
        const=60.0,
        metavar="MINUTES",
        help="instead: what a real API server is asked by an idle agent in so long (60); root",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="instead: programs of others and ours, by the same clients; root",
    )
    parser.add_argument(
        "--against",
        metavar="REV",
        help="instead: this commit and another one in turns, and their ratios with the spread",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="COUNT", help="of --against; default: 3"
    )
    what = parser.add_subparsers(dest="what", metavar="WHAT")
    of_view = what.add_parser("view", help="instead: `kubectl npu` for a large cluster; root")
    of_view.add_argument("--nodes", type=int, default=1000, metavar="COUNT", help="default: 1000")
    wanted = parser.parse_args()
    if wanted.against:
        await against.main(wanted.against, wanted.rounds, wanted.idle or 20.0)
        return
    run_of = report.conditions()
    print(run_of, HEADER, sep="\n\n")
    if wanted.what == "view":
        figures = view.view(wanted.nodes)
    elif wanted.peers:
        figures = peers.peers(wanted.idle or 10.0)
    elif wanted.hour:
        figures = hour.hour(wanted.hour)
    else:
        figures = soak.soak(wanted.soak) if wanted.soak else everything(wanted.idle or 20.0)
    seen = []
    async for one in figures:
        print(one, flush=True)
        seen.append(one)
    if not (wanted.what or wanted.hour or wanted.soak):
        report.write(run_of, seen, peers.COLUMNS if wanted.peers else ())


async def everything(seconds: float) -> AsyncIterator[Figure]:
    """All figures but the soak."""
    for part in (
        idle.idle(seconds),
        plugin.recoveries(),
        plugin.answers(),
        claims.idle(seconds),
        claims.published(),
        claims.answers(),
        pages.scrapes(),
    ):
        async for one in part:
            yield one
    yield limits.limits()
    for figure in packing.packing():
        yield figure


asyncio.run(main())
