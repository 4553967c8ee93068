"""The agent: builds the parts from a config, runs them together, and ends them in order."""

from __future__ import annotations

import asyncio
import platform
import signal
import time
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from npu_agent import __version__, logs
from npu_agent.config import Config, Effective, Poller, disabled_for
from npu_agent.config.resources import resources_of
from npu_agent.core import health
from npu_agent.feed import Feed
from npu_agent.inventory import watch
from npu_agent.inventory.inventory import Inventory
from npu_agent.kube import Api
from npu_agent.kubelet.ownership import Ownership
from npu_agent.kubelet.podresources import PodResources, UnavailableError, offered, socket_beside
from npu_agent.logs import logger
from npu_agent.outputs import cdi
from npu_agent.outputs.deviceplugin.publisher import Publisher, Wanted
from npu_agent.outputs.deviceplugin.session import Session
from npu_agent.outputs.events import Events
from npu_agent.outputs.labels import output_of
from npu_agent.outputs.labels.labeller import Labeller
from npu_agent.outputs.labels.machine import read_machine
from npu_agent.outputs.prometheus import page
from npu_agent.outputs.prometheus.lag import LoopLag
from npu_agent.outputs.prometheus.own import Own
from npu_agent.outputs.prometheus.page import Page
from npu_agent.outputs.web import ready
from npu_agent.outputs.web.history import History
from npu_agent.outputs.web.pages import Pages
from npu_agent.outputs.web.server import Server
from npu_agent.outputs.web.status import Status, status
from npu_agent.supervise import keep_running
from npu_agent.vendors.furiosa.families import core_counts, widths
from npu_agent.vendors.furiosa.sysfs import Furiosa

log = logger(__name__)

_SHUTDOWN = 0.8
"""Seconds for the sessions to end in order; with the rest the process is gone within 1 s."""


class Agent:
    """One node's agent. `run` it once; what it knows can be read from its parts meanwhile."""

    def __init__(
        self,
        effective: Effective,
        *,
        host_root: Path,
        node_name: str | None,
        config_file: Path | None = None,
    ) -> None:
        """Builds the parts; nothing runs yet.

        Args:
            effective: the config to start with.
            host_root: where the host's ``/`` is seen: /sys, /dev and /var/run/cdi are below it. The
                plugin directory is used as configured: the kubelet is not simulated.
            node_name: this Node's name, for what the config says of single nodes.
            config_file: where the config came from, to be followed; None for options.
        """
        config = effective.config
        directory = Path(config.plugin_dir)
        by_cdi = config.allocation.method == "cdi"
        self.poller = Poller(config_file, widths(), effective)
        self.restarts: Counter[str] = Counter()
        """How often each part failed and was started again."""
        self._watching: Feed[watch.Settings] = Feed(_watching(config))
        self.inventory = Inventory([Furiosa(host_root)], self._watching, self.restarts)
        self.pod_resources = PodResources(
            socket_beside(directory), lambda: self._config.metrics.interval
        )
        self._node_name = node_name
        self._hostname = node_name or platform.node()
        self._wanted: Feed[Wanted] = Feed(self._wants(config))
        self.publisher = Publisher(
            snapshots=self.inventory.hardware,
            wanted=self._wanted,
            pod_resources=self.pod_resources,
            directory=directory,
            cdi_root=host_root / cdi.DIRECTORY if by_cdi else None,
        )
        self._api = Api()
        self._sets: Feed[Collection[str]] = Feed(config.labels.sets)
        output = output_of(
            config.labels.output, api=self._api, node_name=node_name, host_root=host_root
        )
        self.labeller = output and Labeller(
            snapshots=self.inventory.hardware,
            sets=self._sets,
            resync=lambda: self._config.labels.resync,
            output=output,
            machine=partial(read_machine, host_root),
        )
        """None where the config wants no labels."""
        self.events = Events(
            api=self._api,
            node_name=node_name,
            snapshots=self.inventory.hardware,
            configs=self.poller.states,
            wanted=lambda: self._config.events,
        )
        self._started_at = time.time()
        self._lag = LoopLag()
        self._shown: Feed[page.Settings] = Feed(self._shows(config))
        self._page = Page(
            snapshots=self.inventory.snapshots,
            holdings=self.pod_resources.holdings,
            settings=self._shown,
            hostname=self._hostname,
            own=self._own,
        )
        self._history = History(self.inventory.snapshots)
        self.server = Server(
            config.metrics.address,
            Pages(
                metrics=self._page.body,
                status=self.status,
                unready=self.unready,
                history=self._history,
            ),
        )
        ownership = Ownership(directory)
        self.sessions = tuple(
            Session(
                resource=resource,
                devices=devices,
                directory=directory,
                socket_name=config.socket_name,
                ownership=ownership,
                prepare=self.publisher.renew,
                note=self.publisher.grant,
                kubelet_lost=self.publisher.kubelet_lost,
                offered=partial(_offered, socket_beside(directory)),
                by_cdi=by_cdi,
            )
            for resource, devices in self.publisher.devices.items()
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set, then ends within a second."""
        async with asyncio.TaskGroup() as parts:
            rest = [
                parts.create_task(keep_running(name, run, self.restarts))
                for name, run in (
                    ("inventory", self.inventory.run),
                    ("pod resources", self.pod_resources.run),
                    ("config", self.poller.run),
                    ("config in force", self._follow_config),
                    ("devices", self.publisher.run),
                    ("events", self.events.run),
                    ("metrics", self._page.run),
                    ("history", self._history.run),
                    ("loop lag", self._lag.run),
                    *((("labels", self.labeller.run),) if self.labeller else ()),
                )
            ]
            sessions = [
                parts.create_task(
                    keep_running(f"plugin {s.status.value.resource}", s.run, self.restarts)
                )
                for s in self.sessions
            ]
            server = parts.create_task(keep_running("server", self.server.run, self.restarts))
            await stop.wait()
            await self.publisher.end()
            # The kubelet first: it should see the end of its stream while everything still works.
            # The server has its own deadline, for clients that do not let go.
            for task in (*sessions, server):
                task.cancel()
            await asyncio.wait(sessions, timeout=_SHUTDOWN)
            for task in (*rest, *sessions):
                task.cancel()
        await self._api.close()

    @property
    def _config(self) -> Config:
        """What is in force now."""
        return self.poller.states.value.config

    async def _follow_config(self) -> None:
        """Brings what changed in the config to where it is not asked for each time."""
        log_config = self._config.log
        async for state in self.poller.states.watch():
            self._wanted.publish(self._wants(state.config))
            self._sets.publish(state.config.labels.sets)
            self._shown.publish(self._shows(state.config))
            self._watching.publish(_watching(state.config))
            if state.config.log != log_config:
                log_config = state.config.log
                logs.setup(log_config.level, log_config.format)

    def _wants(self, config: Config) -> Wanted:
        return Wanted(resources_of(config, core_counts()), disabled_for(config, self._node_name))

    def _shows(self, config: Config) -> page.Settings:
        return page.Settings(
            schema=config.metrics.schema,
            pod_labels=config.metrics.pod_labels,
            interval=config.metrics.interval,
            resources=frozenset(self.publisher.devices),
        )

    def status(self) -> Status:
        """How everything stands now, for people."""
        return status(
            snapshot=self.inventory.snapshots.value,
            holdings=self.pod_resources.holdings.value,
            config=self.poller.states.value,
            sessions=[session.status.value for session in self.sessions],
            devices={name: feed.value for name, feed in self.publisher.devices.items()},
            labels=self.labeller.state.value if self.labeller else None,
            unready=self.unready(),
            node=self._node_name,
            version=__version__,
            started_at=self._started_at,
            now=time.time(),
            monotonic=time.monotonic(),
        )

    def unready(self) -> tuple[str, ...]:
        """What keeps the agent from being ready; empty when it is."""
        return ready.reasons(
            snapshot=self.inventory.snapshots.value,
            wanted=self._wanted.value,
            sessions=[session.status.value for session in self.sessions],
            config=self.poller.states.value,
        )

    def _own(self) -> Own:
        return Own(
            version=__version__,
            hostname=self._hostname,
            now=time.monotonic(),
            snapshot=self.inventory.snapshots.value,
            sessions=tuple((each.status.value, each.counts) for each in self.sessions),
            config=self.poller.states.value,
            restarts=self.restarts,
            lag=self._lag.seconds,
            labels_applied=self.labeller.results if self.labeller else {},
            events=self.events.results,
            reading_failures=self.inventory.failures,
            page_failures=self._page.failures,
        )


def _watching(config: Config) -> watch.Settings:
    return watch.Settings(
        interval=config.interval,
        health_interval=config.health.interval,
        telemetry_interval=config.metrics.interval,
        policy=health.Policy(
            failures=config.health.failures,
            recoveries=config.health.recoveries,
            max_temperature=config.health.max_temperature,
        ),
    )


async def _offered(pod_resources: Path) -> Mapping[str, frozenset[str]] | None:
    """What the kubelet can hand out; None if it does not say, which `PodResources` tells of."""
    try:
        return await offered(pod_resources)
    except UnavailableError:
        return None


async def run(
    effective: Effective, *, host_root: Path, node_name: str | None, config_file: Path | None
) -> None:
    """`npu-agent run`: the agent until SIGTERM or SIGINT. SIGHUP looks at the config at once."""
    config = effective.config
    log.info(
        "npu-agent starts",
        version=__version__,
        node=node_name or "unknown (NODE_NAME is not set)",
        host_root=host_root,
        plugin_dir=config.plugin_dir,
        resources=",".join(resource.name for resource in resources_of(config, core_counts())),
    )
    agent = Agent(effective, host_root=host_root, node_name=node_name, config_file=config_file)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(received: signal.Signals) -> None:
        log.info("ending", signal=received.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(end, number))
    loop.add_signal_handler(signal.SIGHUP, agent.poller.read_now)
    await agent.run(stop)
    log.info("ended")
