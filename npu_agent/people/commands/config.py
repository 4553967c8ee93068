"""`npu-agent config`: check, show or describe the configuration."""

from __future__ import annotations

import argparse
import json

from npu_agent import config
from npu_agent.cli.common import effective
from npu_agent.vendors import REGISTRY


def main(args: argparse.Namespace) -> int:
    match args.action:
        case "check":
            config.load(args.file, REGISTRY)
            print(f"{args.file}: good")
        case "show":
            print(config.show(effective(args)), end="")
        case "schema":
            print(json.dumps(config.json_schema(REGISTRY), indent=2))
    return 0
