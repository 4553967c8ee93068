"""`npu-agent labels`: what would be put on the Node and why; put it there once; clear it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from npu_agent.cli import CommandError
from npu_agent.cli.common import host_root, quiet, vendors
from npu_agent.core.vendor_spec import LabelSet, label_sets
from npu_agent.inventory.inventory import read_once
from npu_agent.kube import Api
from npu_agent.outputs.labels import compute, output_of
from npu_agent.outputs.labels.labeller import Output, OutputError
from npu_agent.outputs.labels.machine import read_machine
from npu_agent.people.commands import view
from npu_agent.vendors import SPECS


def main(args: argparse.Namespace) -> int:
    return asyncio.run(_act(args))


async def _act(args: argparse.Namespace) -> int:
    wanted, root = quiet(args, tolerant=False).labels, host_root(args)
    # Where the config wants no labels, these are about what the default would do.
    method = "api" if wanted.output == "none" else wanted.output
    node = os.environ.get("NODE_NAME")
    async with Api() as api:
        output = output_of(method, api=api, node_name=node, host_root=root)
        assert output is not None  # noqa: S101  (for the type checker)
        try:
            if args.action != "clear":
                await _show_or_apply(args, output, label_sets(SPECS, wanted.sets))
                return 0
            cleared = sorted(await output.clear())
        except OutputError as error:
            raise CommandError(str(error)) from error
    if view.is_data(args):
        print(view.data(cleared, args))
    else:
        print(*cleared or ["nothing to clear"], sep="\n")
    return 0


async def _show_or_apply(
    args: argparse.Namespace, output: Output, sets: tuple[LabelSet, ...]
) -> None:
    snapshot = await read_once(vendors(args))
    machine = await read_machine(host_root(args))
    doubt = compute.why_incomplete(snapshot)
    if args.action == "show":
        explained = list(compute.explained(snapshot, machine, sets))
        if view.is_data(args):
            rows = [{"label": row.key, "value": row.value, "why": row.why} for row in explained]
            print(view.data(rows, args))
        else:
            wide, table = args.output == "wide", view.labels_table(explained)
            print(view.drawn(table, wide=wide, headers=not args.no_headers))
        if doubt:
            print(f"npu-agent: these may not be all: {doubt}", file=sys.stderr)
        return
    if doubt:
        words = "our labels that are on the Node already stay as they are"
        print(f"npu-agent: {doubt}: {words}", file=sys.stderr)
    labels = compute.labels(snapshot, machine, sets)
    done = await output.put(labels, careful=doubt is not None)
    if count := done["left"]:
        raise CommandError(
            f"not applied: {count} of our labels would change, and stay as they are while {doubt}: "
            "apply again when it can be read or is gone, or clear and apply to have the labels of "
            "the other cards"
        )
    if view.is_data(args):
        print(view.data(dict(labels), args))
    else:
        print(*(f"{key}={value}" for key, value in labels.items()), sep="\n")
