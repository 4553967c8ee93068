"""Parts shared by commands: the vendors' cards and words, and logging by the options."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_agent import config, logs
from npu_agent.core.vendor import Vendor
from npu_agent.files import SIMULATION
from npu_agent.vendors import REGISTRY, VENDORS


def host_root(args: argparse.Namespace) -> Path:
    root: Path = getattr(args, "host_root", Path("/"))
    return root


def vendors(args: argparse.Namespace) -> list[Vendor]:
    root = host_root(args)
    return [vendor(root, simulated=(root / SIMULATION).is_dir()) for vendor in VENDORS]


def effective(args: argparse.Namespace) -> config.Effective:
    return config.from_args(args, REGISTRY)


def quiet(args: argparse.Namespace, level: str = "error") -> config.Config:
    """Returns the configuration; logs only errors (`level`), unless the options ask for more."""
    found = effective(args)
    default = found.origins["log.level"] == "default"
    logs.setup(level if default else found.config.log.level, found.config.log.format)
    return found.config
