"""Parts shared by commands: the vendor's cards, and the configuration with quiet logging."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_agent import config, logs
from npu_agent.cli import host_root
from npu_agent.core.vendor import Vendor
from npu_agent.files import SIMULATION
from npu_agent.inventory.card import ProbeSettings
from npu_agent.vendors import SPEC, VENDOR


def vendor(args: argparse.Namespace) -> Vendor:
    root = host_root(args)
    return VENDOR(root, simulated=(root / SIMULATION).is_dir())


def quiet(args: argparse.Namespace, *, tolerant: bool = True) -> config.Config:
    """Returns the configuration; logs only errors, unless the options ask for more.

    `tolerant`: where the environment names a bad file, it is the defaults.
    """
    wanted = "config.log.level" in args
    try:
        configured = config.from_args(args, SPEC).config
    except config.ConfigError as error:
        if not tolerant or any(problem.place.source.startswith("--") for problem in error.problems):
            raise
        configured = config.default_config(SPEC)
    logs.setup(configured.log.level if wanted else "error", configured.log.format)
    return configured


def probe_settings(args: argparse.Namespace, configured: config.Config) -> ProbeSettings:
    """Returns what the agent's probes of this host go by."""
    return ProbeSettings(
        policy=configured.health.policy,
        host_nodes=configured.containers.device_nodes,
        root=str(host_root(args)),
    )


def plugin_dir(args: argparse.Namespace, configured: config.Config) -> Path:
    """Returns the kubelet's directory of a command with `--plugin-dir`."""
    given: Path | None = args.plugin_dir
    return given or Path(configured.plugin_dir)
