"""Parts shared by commands: the vendors' cards and words, and logging by the options."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path

from npu_agent import config, logs
from npu_agent.cli import WRONG, CommandError
from npu_agent.core.vendor import Vendor
from npu_agent.files import SIMULATION
from npu_agent.text import reason
from npu_agent.vendors import REGISTRY, VENDORS

ROOT_VARIABLE = "NPU_AGENT_HOST_ROOT"
"""The environment variable for the default of --host-root."""


def host_root(args: argparse.Namespace) -> Path:
    """Returns where the host's / is: by the option, else by the environment, else /.

    Raises:
        CommandError: it is missing, or not a directory.
    """
    given: Path | None = getattr(args, "host_root", None)
    root = given or Path(os.environ.get(ROOT_VARIABLE) or "/")
    try:
        is_directory = stat.S_ISDIR(root.stat().st_mode)
        wrong = "" if is_directory else f"{root}: no directory"
    except (OSError, ValueError) as error:
        wrong = reason(error)
    if wrong:
        raise CommandError(
            f"{'--host-root' if given else ROOT_VARIABLE}: {wrong}: name the directory where the "
            "host's / is mounted, or one that `npu-agent simulate` made",
            WRONG,
        )
    return root


def vendors(args: argparse.Namespace) -> list[Vendor]:
    root = host_root(args)
    return [vendor(root, simulated=(root / SIMULATION).is_dir()) for vendor in VENDORS]


def quiet(args: argparse.Namespace, *, tolerant: bool = True) -> config.Config:
    """Returns the configuration; logs only errors, unless the options ask for more.

    `tolerant`: where the environment names a bad file, it is the defaults.
    """
    wanted = "config.log.level" in args
    try:
        configured = config.from_args(args, REGISTRY).config
    except config.ConfigError as error:
        if not tolerant or any(problem.place.source.startswith("--") for problem in error.problems):
            raise
        configured = config.default_config(REGISTRY)
    logs.setup(configured.log.level if wanted else "error", configured.log.format)
    return configured


def plugin_dir(args: argparse.Namespace, configured: config.Config) -> Path:
    """Returns the kubelet's directory of a command with `--plugin-dir`."""
    given: Path | None = args.plugin_dir
    return given or Path(configured.plugin_dir)
