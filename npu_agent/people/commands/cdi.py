"""`npu-agent cdi`: CDI specs for hosts without a kubelet, written once or kept true."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import sys
from pathlib import Path

from npu_agent.cli import WRONG, CommandError
from npu_agent.cli.common import host_root, quiet, vendors
from npu_agent.feed import Feed
from npu_agent.inventory.inventory import Inventory, read_once
from npu_agent.outputs.cdi import HOST_DIRECTORY, HostSpecs, SpecDirectory, host_specs
from npu_agent.outputs.hostcdi import HostCdi
from npu_agent.people.commands import view
from npu_agent.people.commands.screen import run_until_signal
from npu_agent.vendors import CDI_KINDS, REGISTRY


def main(args: argparse.Namespace) -> int:
    if args.action == "watch":
        if args.stdout:
            raise CommandError("--stdout goes with `cdi generate` only: leave it out", WRONG)
        quiet(args, "info")  # what is written is this command's output
        run_until_signal(_watch(args))
        return 0  # as of `run`: a service manager ends it by a signal
    quiet(args)
    asyncio.run(_generate(args))
    return 0


async def _generate(args: argparse.Namespace) -> None:
    directory = host_root(args) / HOST_DIRECTORY
    snapshot = await read_once(vendors(args))
    specs = host_specs(snapshot, REGISTRY.families, CDI_KINDS)
    for note in view.remarks(snapshot):
        print(f"npu-agent: {note}", file=sys.stderr)
    for one in specs.left_out:
        print(f"npu-agent: left out: {one}", file=sys.stderr)
    if args.stdout:
        for content in filter(None, specs.files.values()):
            print(content.decode(), end="")
    else:
        await _put(directory, specs)
    if not specs.names:
        remedy = "`npu-agent doctor` says what is missing"
        raise CommandError(f"no NPU to offer below {host_root(args)}: {remedy}")


async def _put(directory: Path, specs: HostSpecs) -> None:
    try:
        there = SpecDirectory(directory, durable=True)
        changed = {
            name for name, content in specs.files.items() if await there.write(name, content)
        }
    except OSError as error:
        # The second name is that of the spec: the first one is of the file next to it.
        where = error.filename2 or directory
        raise CommandError(
            f"{where}: {error.strerror or error}: {_remedy(error)}print the specs by --stdout"
        ) from error
    for name, content in specs.files.items():
        if content is not None:
            print(f"{directory / name} written")
        elif name in changed:
            print(f"{directory / name} removed: there is no NPU to offer")
    for device in specs.names:
        print(device)


def _remedy(error: OSError) -> str:
    """Returns a remedy for specs that cannot be written; ends with "or" unless empty."""
    match error.errno:
        case errno.EACCES | errno.EPERM if os.geteuid():
            return "run it as root, or "
        case errno.EROFS:
            return "mount it writable, or "
        case errno.EISDIR | errno.ENOTDIR | errno.EEXIST:
            return "move away the file that is in its place, or "
    return ""


async def _watch(args: argparse.Namespace) -> None:
    inventory = Inventory(vendors(args))
    cdi = HostCdi(
        snapshots=inventory.hardware,
        widths=REGISTRY.families,
        kinds=CDI_KINDS,
        disabled=Feed(frozenset()),
        directory=host_root(args) / HOST_DIRECTORY,
    )
    async with asyncio.TaskGroup() as parts:
        parts.create_task(inventory.run())
        parts.create_task(cdi.run())
