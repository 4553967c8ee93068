"""`npu-agent doctor`: runs the checks, and gives them what they need of the vendor."""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from npu_agent import logs
from npu_agent.commands import FAILED, view
from npu_agent.commands.common import host_root
from npu_agent.core.hardware import Snapshot
from npu_agent.core.vocabulary import label_sets
from npu_agent.doctor import report
from npu_agent.doctor.examine import examine
from npu_agent.doctor.situation import Driver, Situation, Vendor, configuration, forgotten
from npu_agent.files import content
from npu_agent.inventory.inventory import read_once
from npu_agent.vendors import VENDORS, VOCABULARIES, WORDS
from npu_agent.vendors.furiosa import parse
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.sysfs import Furiosa


async def _snapshot(root: Path) -> Snapshot:
    return await read_once([vendor(root) for vendor in VENDORS])


def _addresses(root: Path) -> frozenset[str]:
    entries = Furiosa(root).scan()
    found = (parse.pci_address(content(Path(entry.path, "busname"), 64)) for entry in entries)
    return frozenset(filter(None, found))


FURIOSA = Vendor(
    name="FuriosaAI",
    pci="1ed2",
    sockets="furiosa",
    drivers=tuple(
        Driver(family=one.name, title=one.title, directory=f"sys/class/{one.class_dir}")
        for one in FAMILIES.values()
    ),
    words=WORDS,
    label_sets=partial(label_sets, VOCABULARIES),
    snapshot=_snapshot,
    addresses=_addresses,
)


def main(args: argparse.Namespace) -> int:
    """Exit code 1 if anything is wrong."""
    wanted, good = configuration(args, WORDS)
    # The file's level is the agent's: here it would mix the probes' own log with the lines.
    asked = "config.log.level" in args
    logs.setup(wanted.log.level if asked else "error", wanted.log.format)
    situation = Situation.here(wanted, host_root(args), FURIOSA)

    async def act() -> int:
        checks = (forgotten(args, situation, good), *await examine(situation))
        # Shown here: what hangs after all, such as a name that is resolved, may delay the end.
        if args.format == "json":
            print(report.as_json(checks))
        else:
            view.show(report.table(checks, narrow=sys.stdout.isatty()), report.summary(checks))
        sys.stdout.flush()
        return FAILED if report.failed(checks) else 0

    return asyncio.run(act())
