"""`npu-agent labels`: what would be put on the Node and why; put it there once; clear it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from npu_agent.cli import CommandError, host_root
from npu_agent.core.vendor import LabelSet
from npu_agent.kube import Api
from npu_agent.outputs.labels import compute
from npu_agent.outputs.labels.compute import read_machine
from npu_agent.outputs.labels.outputs import Output, OutputError, output_of
from npu_agent.people.cards import read_once
from npu_agent.people.commands import view
from npu_agent.people.commands.common import quiet, vendor
from npu_agent.vendors import SPEC


def main(args: argparse.Namespace) -> int:
    asyncio.run(_act(args))
    return 0


async def _act(args: argparse.Namespace) -> None:
    wanted = quiet(args, tolerant=False).labels
    sets = tuple(SPEC.label_sets[name] for name in wanted.sets or (SPEC.label_set,))
    if args.action == "show":
        await _show(args, sets)
        return
    # Where the config wants no labels, these are about what the default would do.
    method = "api" if wanted.output == "none" else wanted.output
    node = os.environ.get("NODE_NAME")
    root = host_root(args)

    async with Api() as api:
        output = output_of(method, api=api, node_name=node, host_root=root)
        assert output is not None  # noqa: S101  (for the type checker)
        try:
            if args.action == "apply":
                await _apply(args, output, sets)
            else:
                cleared = sorted(await output.clear())
                text = "\n".join(cleared or ["nothing to clear"])
                print(view.data(cleared, args) if view.is_data(args) else text)
        except OutputError as error:
            raise CommandError(str(error)) from error


async def _show(args: argparse.Namespace, sets: tuple[LabelSet, ...]) -> None:
    snapshot = await read_once(vendor(args))
    machine = await read_machine(host_root(args))
    explained = list(compute.explained(snapshot, machine, sets))
    if view.is_data(args):
        rows = [{"label": row.key, "value": row.value, "why": row.why} for row in explained]
        print(view.data(rows, args))
    else:
        wide = args.output == "wide"
        table = view.labels_table(explained)
        print(view.drawn(table, wide=wide, headers=not args.no_headers))
    if doubt := compute.why_incomplete(snapshot):
        print(f"npu-agent: these may not be all: {doubt}", file=sys.stderr)


async def _apply(args: argparse.Namespace, output: Output, sets: tuple[LabelSet, ...]) -> None:
    snapshot = await read_once(vendor(args))
    machine = await read_machine(host_root(args))
    if doubt := compute.why_incomplete(snapshot):
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
    text = "\n".join(f"{key}={value}" for key, value in labels.items())
    print(view.data(dict(labels), args) if view.is_data(args) else text)
