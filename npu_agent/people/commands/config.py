"""`npu-agent config`: check, show or describe the configuration."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from npu_agent import config
from npu_agent.config.show import json_schema, show
from npu_agent.vendors import REGISTRY


def main(args: argparse.Namespace) -> int:
    match args.action:
        case "check":
            loaded = config.load(args.file, REGISTRY).config
            print(f"{args.file}: good")
            for remark in remarks(loaded):
                print(f"note: {remark}")
        case "show":
            print(show(config.from_args(args, REGISTRY)), end="")
        case "schema":
            print(json.dumps(json_schema(REGISTRY), indent=2))
    return 0


def remarks(checked: config.Config) -> Iterator[str]:
    """Yields what is valid and has no effect."""
    apis = {checked.allocation.api, *(node.api for node in checked.allocation.nodes)}
    apis |= {resource.api for resource in checked.resources if resource.api}
    if checked.health.evict and apis.isdisjoint({"dra", "auto"}):
        yield "health.evict has no effect: no card is offered by DRA (allocation.api)"
