"""The agent: builds the parts from a config, runs them together, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from npu_agent import __version__, logs
from npu_agent.config import Config, Effective, Poller, disabled_for, poller
from npu_agent.config.resources import asks_for, offered_by, resources_of
from npu_agent.core import changes, health
from npu_agent.core.condition import maintenance
from npu_agent.core.cordon import ANNOTATION
from npu_agent.core.ledger import Ledger
from npu_agent.core.offer import Device
from npu_agent.core.state import (
    AgentState,
    DraState,
    Invocation,
    ResourceState,
    SessionPhase,
    stale_after,
)
from npu_agent.core.trends import degraded
from npu_agent.core.vendor_spec import VendorSpec, label_sets, metric_schemas
from npu_agent.feed import Feed, changes_of
from npu_agent.inventory import card
from npu_agent.inventory.inventory import Inventory
from npu_agent.kube import Api, credentials
from npu_agent.kube.own_node import NodeWatch, OwnNode
from npu_agent.kubelet.allocation_store import AllocationStore, Served
from npu_agent.kubelet.cordons import CordonStore
from npu_agent.kubelet.directories import until_deleted
from npu_agent.kubelet.ownership import HAND_OVER, Ownership
from npu_agent.kubelet.podresources import PodResources, UnavailableError, offered, socket_beside
from npu_agent.kubelet.pods import Pods
from npu_agent.kubelet.record import read_record, recover
from npu_agent.logs import logger
from npu_agent.outputs import cdi
from npu_agent.outputs import condition as node_condition
from npu_agent.outputs.condition import ConditionWriter, Observed
from npu_agent.outputs.deviceplugin import session
from npu_agent.outputs.deviceplugin.publisher import Publisher, Wanted
from npu_agent.outputs.deviceplugin.session import Hooks, Plugin, Session
from npu_agent.outputs.deviceplugin.specs import PluginSpecs
from npu_agent.outputs.dra import driver, support
from npu_agent.outputs.dra.driver import Driver, Shared
from npu_agent.outputs.dra.driver import Wanted as WantedByClaims
from npu_agent.outputs.dra.support import SupportWatch
from npu_agent.outputs.events import Events, Sources
from npu_agent.outputs.labels import output_of
from npu_agent.outputs.labels.labeller import Labeller, Settings
from npu_agent.outputs.labels.machine import read_machine
from npu_agent.outputs.prometheus import page
from npu_agent.outputs.prometheus.lag import LoopLag
from npu_agent.outputs.prometheus.page import Page
from npu_agent.outputs.web.authorization import Authorizer
from npu_agent.outputs.web.history import History
from npu_agent.outputs.web.pages import Pages, pages, probes
from npu_agent.outputs.web.recorder import Recorder
from npu_agent.outputs.web.server import Limits, Server
from npu_agent.outputs.web.tls import Certificates, tls_files
from npu_agent.shutdown import LONGEST, Shutdown
from npu_agent.supervise import keep_running
from npu_agent.vendors import CDI_KINDS, DRIVERS, REGISTRY, SPECS, VENDORS

log = logger(__name__)


_Part = tuple[str, Callable[[], Coroutine[Any, Any, None]]]
"""A name, for the log and the metric of restarts, and what runs until it is cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of the agent and of its parts, in seconds.

    The DaemonSet's terminationGracePeriodSeconds has room for `HAND_OVER`, `calls` and `LONGEST`.
    """

    calls: float = 10.0
    """At the end, for calls of the kubelet that are under way. A Pod whose Allocate is cut fails
    for good, and a kubelet comes back after a minute to a claim that was not prepared. Most calls
    take milliseconds, or seconds where many Pods start; one that waits longer is given up."""
    end: float = 0.9
    """Then, for the publisher (0.3 at most) and the sessions to end in order; with the rest the
    process is gone within 1 s."""
    ask_again: float = 60.0
    """Seconds until a node without DRA support is asked again."""
    config: poller.Timing = field(default_factory=poller.Timing)
    sessions: session.Timing = field(default_factory=session.Timing)
    drivers: driver.Timing = field(default_factory=driver.Timing)


_KUBELET_FIRST = 1.0
"""Seconds, at most, that the API server is asked later for the kubelet's sake."""
_JUMP = 0.1
"""Seconds that the wall clock has to jump before pages and metrics follow: less is the time between
two clock reads."""


@dataclass(frozen=True, slots=True)
class Host:
    """The surroundings of an agent."""

    root: Path
    """Where its ``/`` is seen, with /sys, /dev and /var/run/cdi; the plugin directory is used as
    configured."""
    node_name: str | None
    """This Node's name, for config of single nodes."""
    pod: str = ""
    """The agent's Pod, ``namespace/name``; empty: it runs in none."""
    simulation: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Runs the simulated cards below `root`; None: the cards are real."""


class Agent:
    """The agent of one node. `run` it once; read its parts for its state."""

    def __init__(
        self,
        effective: Effective,
        host: Host,
        *,
        config_file: Path | None = None,
        api: Api | None = None,
        timing: Timing = Timing(),
    ) -> None:
        """Builds the parts; nothing runs yet.

        Args:
            effective: the config to start with.
            host: where it runs.
            config_file: where the config came from, to be followed; None for options.
            api: the API server; None: the one that this Pod, or this user, belongs to.
            timing: all times.
        """
        self._timing = timing
        self._simulation = host.simulation
        config = effective.config
        host_root, node_name = host.root, host.node_name
        directory = Path(config.plugin_dir)
        by_cdi = config.allocation.method == "cdi"
        self.poller = Poller(config_file, REGISTRY, effective, timing.config)
        configs = self.poller.configs
        self.restarts: Counter[str] = Counter()
        """Restarts of each part after a failure."""
        found = read_record(directory)
        ledger = Feed(recover(Ledger(), found, time.monotonic()))
        self._recorded = ledger.value.cards
        self.inventory = Inventory(
            [vendor(host_root, simulated=host.simulation is not None) for vendor in VENDORS],
            configs.map(_watching),
            self.restarts,
            known=ledger.value.cards,
        )
        self.pod_resources = PodResources(
            socket_beside(directory),
            configs.map(lambda config: config.metrics.interval),
            Pods(directory, host_root),
            ledger,
        )
        self._node_name = node_name
        self._invocation = Invocation(
            pod=host.pod, config_file=str(config_file or ""), host_root=str(host_root)
        )
        self._hostname = node_name or platform.node()
        self._api = api or Api(after=self._kubelet_first)
        self.dra_support = SupportWatch(
            self._api,
            node_name,
            support.Wanted(
                auto=asks_for(config, "auto", node_name), dra=asks_for(config, "dra", node_name)
            ),
            timing.ask_again,
        )
        self._wanted = configs.map_with(self.dra_support.state, partial(_wanted, node_name))
        self.store = AllocationStore(
            snapshots=self.inventory.hardware,
            pod_resources=self.pod_resources,
            served=Served(
                resources=[one.name for one in self._wanted.value.resources], drivers=DRIVERS
            ),
            directory=directory,
            ledger=ledger,
        )
        self.node_watch = NodeWatch(self._api, node_name, configs.map(_follows_node))
        self.cordons = CordonStore(
            self.node_watch.state.map_with(configs.map(lambda config: config.cordon), _annotation),
            self.inventory.hardware,
            self._wanted.map(lambda wanted: wanted.disabled),
            directory,
        )
        self.publisher = Publisher(
            snapshots=self.inventory.hardware,
            wanted=self._wanted,
            store=self.store,
            cordons=self.cordons.cards,
            specs=PluginSpecs(host_root / cdi.DIRECTORY, CDI_KINDS, by_cdi=by_cdi),
        )
        method = config.labels.output
        output = output_of(method, api=self._api, node_name=node_name, host_root=host_root)
        self.labeller = output and Labeller(
            snapshots=self.inventory.hardware,
            settings=configs.map(_label_settings),
            output=output,
            seen=self.node_watch.state.map(_labels) if method == "api" else None,
            machine=partial(read_machine, host_root),
        )
        """None without labels in the config, or without a Node."""
        self._ownership = ownership = Ownership(directory, self.store.disowned)
        self._degraded = self.inventory.trends.map(degraded)
        self.drivers = tuple(
            Driver(
                words,
                driver.Host(
                    node_name=node_name,
                    kubelet_root=directory.parent,
                    cdi_root=host_root / cdi.DIRECTORY,
                ),
                Shared(
                    snapshots=self.inventory.hardware,
                    store=self.store,
                    ownership=ownership,
                    cordons=self.cordons,
                    degraded=self._degraded,
                ),
                configs.map_with(
                    self.dra_support.state, partial(_wanted_by_claims, node_name, words)
                ),
                self._api,
                timing.drivers,
            )
            for words in SPECS
            if words.dra
        )
        self.directories = (
            directory,
            socket_beside(directory).parent,
            *(path for driver in self.drivers for path in driver.directories),
        )
        """The kubelet's that this agent uses."""
        self.events = Events(
            api=self._api,
            node_name=node_name,
            sources=Sources(
                snapshots=self.inventory.hardware,
                usages=self.store.usages,
                trends=self.inventory.trends,
                configs=self.poller.states,
                cordons=self.cordons.state,
                drivers=tuple(driver.status for driver in self.drivers),
            ),
            wanted=configs.map(lambda config: config.events),
        )
        self._log_settings = configs.map(lambda config: config.log)
        self._started_at = time.monotonic()
        self._ahead = time.time() - self._started_at
        """Seconds that the wall clock is ahead of `time.monotonic`."""
        self._lag = LoopLag()
        self._page = Page(
            snapshots=self.inventory.snapshots,
            holdings=self.store.usages,
            settings=configs.map(_page_settings),
            hostname=self._hostname,
            state=self.state,
        )
        self._history = History(self.inventory.snapshots)
        files = tls_files(config.metrics.tls)
        self.certificates = Certificates(files) if files else None
        """None where the config wants no TLS."""
        by_cluster = config.metrics.authorization == "kubernetes"
        self.authorizer = Authorizer(self._api) if by_cluster else None
        """None where any client may read the pages."""
        self.server = Server(
            "metrics",
            config.metrics.address,
            Pages(pages(self._page.body, self.state, self._history)),
            certificates=self.certificates,
            authorizer=self.authorizer,
        )
        self.probes = Server(
            "probes",
            config.metrics.probes_address,
            Pages(probes(self.state), fresh=0.0),
            Limits(silence=2.0),  # the kubelet comes on a new connection for each probe
        )
        """A listener for the kubelet alone: clients of the other one cannot block its probes."""
        hooks = Hooks(
            prepare=self.publisher.renew,
            grant=self._grant,
            kubelet_lost=self.store.kubelet_lost,
            offered=partial(_offered, socket_beside(directory)),
        )
        self.sessions = tuple(
            Session(
                Plugin(
                    resource=resource,
                    directory=directory,
                    socket_name=config.socket_name,
                    by_cdi=by_cdi,
                ),
                devices,
                ownership,
                hooks,
                timing.sessions,
            )
            for resource, devices in self.publisher.devices.items()
        )
        self._maintenance = self.node_watch.state.map(_maintenance)
        self.condition = ConditionWriter(
            api=self._api,
            node_name=node_name,
            observed=Observed(
                self.state,
                (
                    self.inventory.hardware,
                    self.store.usages,
                    self.cordons.cards,
                    self._degraded,
                    self._maintenance,
                    self.dra_support.state,
                    *(session.status for session in self.sessions),
                    *(driver.status for driver in self.drivers),
                    *(driver.slices.state for driver in self.drivers),
                ),
            ),
            wanted=configs.map(_condition),
            directory=directory,
        )
        self._recorder = Recorder(
            __version__,
            self.inventory.hardware,
            self.inventory.trends,
            self.store.usages,
            [
                (self.cordons.state, changes.cordon_entries),
                (self.inventory.trends, changes.trend_entries),
                (self.poller.states, changes.config_entries),
                *(
                    (one.status, partial(changes.session_entries, subject="resource"))
                    for one in self.sessions
                ),
                *(
                    (one.status, partial(changes.session_entries, subject="dra"))
                    for one in self.drivers
                ),
                *(((self.labeller.state, changes.label_entries),) if self.labeller else ()),
            ],
        )

    async def run(
        self, stop: asyncio.Event, allow: Callable[[float], None] = lambda _: None
    ) -> None:
        """Runs until `stop` is set, then ends: within a second if nothing waits.

        Another agent that stands by is registered first, and a call of the kubelet is answered.
        `allow` is called with the seconds that the end may take from then on.
        """
        async with asyncio.TaskGroup() as parts:

            def start(named: Iterable[_Part]) -> list[asyncio.Task[None]]:
                return [
                    parts.create_task(keep_running(name, run, self.restarts)) for name, run in named
                ]

            rest = start(self._parts())
            kubelet = start(
                (
                    *((f"plugin {s.status.value.resource}", s.run) for s in self.sessions),
                    *((f"DRA {d.status.value.resource}", d.run) for d in self.drivers),
                )
            )
            servers = start((("server", self.server.run), ("probes", self.probes.run)))
            await stop.wait()
            allow(HAND_OVER + self._timing.calls + LONGEST)
            await self._ownership.hand_over()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.calls):
                    await asyncio.gather(
                        *(session.idle() for session in self.sessions),
                        *(driver.idle() for driver in self.drivers),
                    )
            allow(LONGEST)
            until = time.monotonic() + self._timing.end
            await self.publisher.end()
            # The kubelet first: it should see the end of its stream while everything still works.
            # The servers have their own deadline, for clients that do not let go.
            for task in (*kubelet, *servers):
                task.cancel()
            await asyncio.wait(kubelet, timeout=max(0.0, until - time.monotonic()))
            for task in rest:
                task.cancel()
        await self._api.close()

    def _parts(self) -> Iterator[_Part]:
        """Yields the parts other than sessions, drivers and servers."""
        if self._simulation:
            yield "simulation", self._simulation
        yield "inventory", self.inventory.run
        yield "config", self.poller.run
        yield "log settings", self._follow_log
        yield "pod resources", self.pod_resources.run
        yield "ledger", self.store.run
        yield "devices", self.publisher.run
        yield "DRA support", self.dra_support.run
        yield "Node", self.node_watch.run
        yield "cordons", self.cordons.run
        yield "events", self.events.run
        if self.labeller:
            yield "labels", self.labeller.run
        yield "node condition", self.condition.run
        yield "history", self._history.run
        yield "timeline", self._recorder.run
        yield "loop lag", self._lag.run
        if self.certificates:
            yield "certificates", self.certificates.run

    async def _kubelet_first(self) -> None:
        """Waits until the kubelet has our devices, or needs the API server for them; a second."""
        drivers = [driver.status for driver in self.drivers]
        sessions = [session.status for session in self.sessions]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KUBELET_FIRST):
                async for _ in changes_of(*drivers, *sessions):
                    if any(one.value.phase is SessionPhase.REGISTERED for one in sessions):
                        return
                    if any(one.value.phase is not SessionPhase.NO_CARDS for one in drivers):
                        return

    async def _follow_log(self) -> None:
        applied = self._log_settings.value
        async for wanted in self._log_settings.watch():
            if wanted != applied:
                applied = wanted
                logs.setup(wanted.level, wanted.format)

    def state(self) -> AgentState:
        config, kubelet = self.poller.configs.value, self.pod_resources.holdings.value
        wanted, served = self._wanted.value, self._served()
        monotonic = time.monotonic()
        if abs((ahead := time.time() - monotonic) - self._ahead) > _JUMP:
            self._ahead = ahead
        return AgentState(
            version=__version__,
            node=self._node_name,
            hostname=self._hostname,
            invocation=self._invocation,
            started_at=self._started_at,
            now=monotonic + self._ahead,
            monotonic=monotonic,
            snapshot=self.inventory.snapshots.value,
            usages=self.store.usages.value,
            assignments=kubelet.assignments,
            assignments_error=kubelet.error,
            resources=tuple(
                ResourceState(session=each.status.value, counts=each.counts, devices=devices.value)
                for each, devices in zip(
                    self.sessions, self.publisher.devices.values(), strict=True
                )
                if each.status.value.resource in served
            ),
            # Each resource has a stream of its own and loses it when the kubelet restarts.
            kubelet_restarts=max((each.counts.returns for each in self.sessions), default=0),
            dra=tuple(
                DraState(
                    session=each.status.value,
                    counts=each.counts,
                    slices=each.slices.state.value,
                    devices=each.offered.value or (),
                    claims=each.prepared(),
                )
                for each in self.drivers
                if each.needed
            ),
            wanted=tuple(one.of_families(wanted.families) for one in wanted.resources),
            unsettled=self.dra_support.state.value.waits,
            cordons=self.cordons.cards.value,
            held_by=self.store.held_by(
                card
                for card in self.inventory.snapshots.value.cards
                if card.id in self.cordons.cards.value
            ),
            expected_cards=config.health.expected_cards,
            recorded=self._recorded,
            first_ids=self.cordons.state.value.first_ids,
            cordons_lost=self.cordons.state.value.lost,
            cordons_wrong=self.cordons.state.value.wrong,
            api_error=self._api.silent,
            node_error=self.node_watch.error,
            reads=self._api.reads,
            disabled=wanted.disabled,
            config=self.poller.states.value,
            stale_after=stale_after(config.metrics.interval),
            max_temperature=config.health.max_temperature,
            labels=self.labeller.state.value if self.labeller else None,
            condition=self.condition.state.value,
            trends=self.inventory.trends.value,
            maintenance=self._maintenance.value,
            timeline=self._recorder.timeline,
            restarts=self.restarts,
            lag=self._lag.seconds,
            labels_applied=self.labeller.results if self.labeller else {},
            events=self.events.results,
            reading_failures=self.inventory.failures,
            page_failures=self._page.failures,
            cdi_error=self.publisher.cdi_error,
            tls=self.certificates.state.value if self.certificates else None,
            authorizations=self.authorizer.results if self.authorizer else {},
            refused={
                (name, "open"): server.made_room
                for name, server in (("metrics", self.server), ("probes", self.probes))
            },
        )

    async def _grant(self, resource: str, devices: Sequence[Device]) -> None:
        await self.cordons.check(devices)
        await self.store.grant_when_free(resource, devices)

    def _served(self) -> set[str]:
        """Returns the resources that the device plugin serves, or is to serve."""
        wanted = self._wanted.value
        return {
            resource.name
            for resource in wanted.resources
            if self.publisher.devices[resource.name].value
            or resource.of_families(wanted.families).widths
        }


def _watching(config: Config) -> card.Settings:
    return card.Settings(
        interval=config.interval,
        health_interval=config.health.interval,
        telemetry_interval=config.metrics.interval,
        policy=health.Policy(
            failures=config.health.failures,
            recoveries=config.health.recoveries,
            max_temperature=config.health.max_temperature,
            slow_after=config.health.slow_after,
        ),
    )


def _follows_node(config: Config) -> bool:
    return (
        config.cordon or config.labels.output == "api" or config.health.condition.type is not None
    )


def _label_settings(config: Config) -> Settings:
    return Settings(label_sets(SPECS, config.labels.sets), config.labels.resync)


def _maintenance(found: OwnNode | None) -> str:
    return maintenance(found.conditions, unschedulable=found.unschedulable) if found else ""


def _labels(found: OwnNode | None) -> Mapping[str, str] | None:
    return None if found is None else found.labels


def _annotation(found: OwnNode | None, wanted: bool) -> str | None:
    """The cordons as the Node has them; None as long as that is not known."""
    if not wanted:
        return ""
    return None if found is None else found.annotations.get(ANNOTATION, "")


def _wanted(node_name: str | None, config: Config, dra: support.Known) -> Wanted:
    counts = REGISTRY.core_counts
    return Wanted(
        resources_of(config, counts),
        disabled_for(config, node_name),
        offered_by(config, counts, "device-plugin", node_name, auto=dra.available),
    )


def _wanted_by_claims(
    node_name: str | None, words: VendorSpec, config: Config, dra: support.Known
) -> WantedByClaims:
    return WantedByClaims(
        families=offered_by(config, words.families, "dra", node_name, auto=dra.available),
        decided=not dra.waits,
        disabled=frozenset(name.lower() for name in disabled_for(config, node_name)),
        by_index=config.dra.device_names == "index",
        partitions=config.dra.partitions,
        evict=config.health.evict,
        impossible=dra.impossible,
    )


def _condition(config: Config) -> node_condition.Wanted:
    return node_condition.Wanted(config.health.condition.type, config.health.expected_cards)


def _page_settings(config: Config) -> page.Settings:
    return page.Settings(
        schemas=metric_schemas(SPECS, config.metrics.schema),
        pod_labels=config.metrics.pod_labels,
        interval=config.metrics.interval,
    )


async def _offered(pod_resources: Path) -> Mapping[str, frozenset[str]] | None:
    """Devices the kubelet can allocate; None if unknown, which `PodResources` logs."""
    try:
        return await offered(pod_resources)
    except UnavailableError:
        return None


async def run(
    effective: Effective,
    host: Host,
    *,
    config_file: Path | None,
    shutdown: Shutdown,
) -> bool:
    """Runs the agent until SIGTERM or SIGINT (`npu-agent run`). SIGHUP reads the config now.

    Returns False if it ends by itself: only a new container gets back to the kubelet.
    """
    config = effective.config
    log.info(
        "npu-agent starts",
        version=__version__,
        node=host.node_name or "unknown (NODE_NAME is not set)",
        host_root=host.root,
        plugin_dir=config.plugin_dir,
        resources=",".join(
            resource.name for resource in resources_of(config, REGISTRY.core_counts)
        ),
    )
    if host.simulation:
        log.warning("the cards are simulated: containers get /dev/null in place of device nodes")
    credentials.trust_only_the_cluster()
    agent = Agent(effective, host, config_file=config_file)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(logs.LoopErrors())

    def end(received: signal.Signals) -> None:
        log.info("shutting down", signal=received.name)
        stop.set()

    shutdown.begin(end)
    loop.add_signal_handler(signal.SIGHUP, agent.poller.read_now)
    deleted = asyncio.create_task(until_deleted(agent.directories))
    deleted.add_done_callback(lambda _: stop.set())
    await agent.run(stop, shutdown.allow)
    if deleted.done():
        log.error(
            "a directory of the kubelet was deleted: exiting, because only a new container sees "
            "the directory in its place",
            directory=deleted.result(),
        )
        return False
    log.info("ended")
    return True
