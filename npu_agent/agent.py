"""The agent: builds the parts from a config, runs them together, and ends them in order."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path

from npu_agent import __version__
from npu_agent.config import Config, disabled_for
from npu_agent.devices import health, inventory
from npu_agent.devices.families import FAMILIES
from npu_agent.devices.host import Host
from npu_agent.devices.inventory import Inventory
from npu_agent.feed import Feed
from npu_agent.logs import logger
from npu_agent.plugin.advertise import Resource, advertise, resources
from npu_agent.plugin.service import Devices
from npu_agent.plugin.session import Session
from npu_agent.supervise import keep_running

log = logger(__name__)

_CORES = {"Fusion": None, "Single": 1}
"""Cores of a device for each defaultPe; None is the whole card."""

_SHUTDOWN = 0.8
"""Seconds for the sessions to end in order; with the rest the process is gone within 1 s."""


class Agent:
    """One node's agent. `run` it once; what it knows can be read from its parts meanwhile."""

    def __init__(self, config: Config, *, host_root: Path, node_name: str | None) -> None:
        """`host_root` is where the host's ``/`` is seen: /sys and /dev are read below it.

        The plugin directory is used as configured, not below `host_root`: the kubelet is not
        simulated.
        """
        self.config: Feed[Config] = Feed(config)
        self.inventory = Inventory(Host(host_root), FAMILIES, self._inventory_settings)
        self._node_name = node_name
        self._devices: dict[Resource, Feed[Devices]] = {
            resource: Feed(()) for resource in resources_of(config)
        }
        self.sessions = tuple(
            Session(
                resource=resource.name,
                devices=devices,
                directory=Path(config.plugin_dir),
                socket_name=config.socket_name,
            )
            for resource, devices in self._devices.items()
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set, then ends within a second."""
        async with asyncio.TaskGroup() as parts:
            rest = [
                parts.create_task(keep_running("inventory", self.inventory.run)),
                parts.create_task(keep_running("devices", self._follow)),
            ]
            sessions = [
                parts.create_task(keep_running(f"plugin {s.status.value.resource}", s.run))
                for s in self.sessions
            ]
            await stop.wait()
            # The kubelet first: it should see the end of its stream while everything still works.
            for task in sessions:
                task.cancel()
            await asyncio.wait(sessions, timeout=_SHUTDOWN)
            for task in (*rest, *sessions):
                task.cancel()

    async def _follow(self) -> None:
        """Tells the sessions what to advertise, whenever the hardware changes."""
        async for snapshot in self.inventory.snapshots.watch():
            if not snapshot.complete:
                continue  # never an empty list before the real one
            config = self.config.value
            disabled = disabled_for(config, self._node_name)
            for resource, devices in self._devices.items():
                devices.publish(advertise(snapshot, resource, disabled))

    def _inventory_settings(self) -> inventory.Settings:
        config = self.config.value
        return inventory.Settings(
            interval=config.interval,
            health_interval=config.health.interval,
            telemetry_interval=config.metrics.interval,
            policy=health.Policy(
                failures=config.health.failures, recoveries=config.health.recoveries
            ),
        )


def resources_of(config: Config) -> tuple[Resource, ...]:
    """The resources that a config asks for."""
    overrides = tuple((spec.name, spec.family, spec.cores_per_device) for spec in config.resources)
    return resources(config.resource_name, _CORES[config.default_pe], overrides)


async def run(config: Config, *, host_root: Path, node_name: str | None) -> None:
    """`npu-agent run`: the agent until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(received: signal.Signals) -> None:
        log.info("ending", signal=received.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(end, number))
    log.info(
        "npu-agent starts",
        version=__version__,
        node=node_name or "unknown (NODE_NAME is not set)",
        host_root=host_root,
        plugin_dir=config.plugin_dir,
        resources=",".join(resource.name for resource in resources_of(config)),
    )
    await Agent(config, host_root=host_root, node_name=node_name).run(stop)
    log.info("ended")
