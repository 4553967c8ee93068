"""`npu-agent cdi`: CDI specs for hosts without a kubelet, written once or kept true."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import sys

from npu_agent.commands import CommandError
from npu_agent.commands.common import host_root, quiet, vendors
from npu_agent.core.hardware import Snapshot
from npu_agent.feed import Feed
from npu_agent.inventory.inventory import Inventory, read_once
from npu_agent.logs import setup
from npu_agent.outputs.cdi import HOST_DIRECTORY, host_specs
from npu_agent.outputs.hostcdi import HostCdi, write
from npu_agent.vendors import WORDS


def main(args: argparse.Namespace) -> int:
    """Does `args.action`."""
    config = quiet(args)
    if args.action == "generate":
        asyncio.run(_generate(args))
        return 0
    if config.log.level == "error":  # of `quiet`: what is written is this command's output
        setup("info", config.log.format)
    asyncio.run(_watch(args))
    return 0


async def _generate(args: argparse.Namespace) -> None:
    directory = host_root(args) / HOST_DIRECTORY
    snapshot = await read_once(vendors(args))
    specs = host_specs(snapshot, WORDS.families)
    for odd in snapshot.odd:
        print(f"npu-agent: not served: {odd.entry}: {odd.reason}", file=sys.stderr)
    for one in specs.left_out:
        print(f"npu-agent: left out: {one}", file=sys.stderr)
    if not specs.files:
        remedy = "`npu-agent doctor` says what is missing"
        raise CommandError(f"no NPU to offer below {host_root(args)}: {remedy}")
    if args.stdout:
        for content in specs.files.values():
            print(content.decode(), end="")
        return
    try:
        await write(directory, specs)
    except OSError as error:
        # The second name is that of the spec: the first one is of the file beside it.
        where = error.filename2 or directory
        raise CommandError(
            f"{where}: {error.strerror or error}: {_remedy(error)}print the specs by --stdout"
        ) from error
    print(*(f"{directory / name} written" for name in specs.files), sep="\n")
    print(*specs.names, sep="\n")


def _remedy(error: OSError) -> str:
    """What may help where specs cannot be written; ends with "or", unless nothing is known."""
    match error.errno:
        case errno.EACCES | errno.EPERM if os.geteuid():
            return "run it as root, or "
        case errno.EROFS:
            return "mount it to be written, or "
        case errno.EISDIR | errno.ENOTDIR | errno.EEXIST:
            return "move away what is in the place of it, or "
    return ""


async def _watch(args: argparse.Namespace) -> None:
    inventory = Inventory(vendors(args))
    cdi = HostCdi(
        snapshots=inventory.snapshots.map(Snapshot.without_readings),
        widths=WORDS.families,
        disabled=Feed(frozenset()),
        directory=host_root(args) / HOST_DIRECTORY,
    )
    parts = [asyncio.create_task(each.run()) for each in (inventory, cdi)]
    stop = asyncio.create_task(asyncio.Event().wait())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.cancel)
    done, _ = await asyncio.wait((*parts, stop), return_when=asyncio.FIRST_COMPLETED)
    for task in (*parts, stop):
        task.cancel()
    for task in done & set(parts):
        task.result()  # raises: neither of them ends by itself
