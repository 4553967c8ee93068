"""`npu-agent run`: the agent."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from npu_agent import config, logs
from npu_agent.cli import FAILED, WRONG, CommandError, host_root
from npu_agent.shutdown import Shutdown
from npu_agent.vendors import PROFILE, SPEC, VENDOR

if TYPE_CHECKING:
    from npu_agent.agent.parts import Simulation

_MOST = 64
"""Simulated cards of a node. The simulator makes more, for tests; nodes have 16 at most."""
THIS_HOST = Path("/")
"""The node's own /sys, in a container too; --host-root does not change it."""


def main(args: argparse.Namespace) -> int:
    # The first process of a container has no default for SIGTERM: without this, an agent that is
    # ended while it still imports would be waited for until it is killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    effective = config.from_args(args, SPEC, strict=True)
    logs.setup(effective.config.log.level, effective.config.log.format)
    node = os.environ.get("NODE_NAME") or None
    simulation = _simulated(args.simulate, host_root(args), node) if args.simulate else None
    from npu_agent.agent.parts import Host
    from npu_agent.agent.run import run

    shutdown = Shutdown()
    pod = "/".join(os.environ.get(name, "") for name in ("POD_NAMESPACE", "POD_NAME"))
    host = Host(host_root(args), node, pod.strip("/"), simulation)
    file = config.file_of(args)
    as_asked = asyncio.run(run(effective, host, config_file=file, shutdown=shutdown))
    # Python's own end unloads 1,500 modules: up to 0.3 s, for which a rollout would wait.
    os._exit(0 if as_asked else FAILED)


def _simulated(wanted: str, root: Path, node: str | None) -> Simulation:
    """Makes simulated cards below `root`; returns the function that keeps them alive.

    Raises:
        CommandError: it is asked for what cannot be, or this node has real cards.
    """
    from npu_agent.people import simulator

    if real := _real_cards():
        raise CommandError(
            f"--simulate {wanted}: this node has real cards ({', '.join(real)}), and gets no "
            "simulated ones in addition: leave out --simulate (chart: simulate), or keep this "
            f"agent away: kubectl label node {node or 'NODE'} npu-agent/enabled=false"
        )
    try:
        cards = simulator.parse_cards(
            wanted, option="--simulate", most=_MOST, host=f"{node}/" if node else ""
        )
        simulator.make(root, cards, plain_nodes=True)
    except ValueError as error:
        raise CommandError(str(error), WRONG) from error
    except simulator.SimulatorError as error:
        raise CommandError(f"--simulate, --host-root: {error}", FAILED) from error
    return partial(simulator.simulate, root)


def _real_cards() -> list[str]:
    """Names this node's real cards for people: on the PCI bus, and of a driver."""
    from npu_agent.people.doctor.host import on_the_bus

    entries = [entry.name for entry in VENDOR(THIS_HOST).scan()]
    return entries + [str(card) for card in on_the_bus(THIS_HOST, PROFILE.pci)]
