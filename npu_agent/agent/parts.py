"""The parts of the agent, built in the order of the picture in docs/dev/architecture.md.

Each function below builds one part from those before it: `hardware`, `node`, `allocation`,
`kubelet`, `cluster`, `web`. Nothing runs yet. `npu_agent.agent.agent` calls them. A part that
the defaults do not need is imported where the config asks for it.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_agent.config import Config, Poller, TlsConfig, disabled_for, poller
from npu_agent.config.resources import asks_for, offered_by, resources_of
from npu_agent.core import changes
from npu_agent.core.cordon import ANNOTATION
from npu_agent.core.ledger import Ledger
from npu_agent.core.plan import DraWishes, PluginWishes
from npu_agent.core.state import AgentState
from npu_agent.core.utilization import LONGEST_PAUSE
from npu_agent.feed import Feed
from npu_agent.inventory import card
from npu_agent.inventory.inventory import Inventory
from npu_agent.inventory.uevents import KernelEvents
from npu_agent.kube import Api
from npu_agent.kube.node import NodeWatch, OwnNode
from npu_agent.kubelet import cdi
from npu_agent.kubelet.allocator import Allocator, ClaimPool, PlanInputs
from npu_agent.kubelet.cordons import CordonStore
from npu_agent.kubelet.ownership import Ownership
from npu_agent.kubelet.podresources import PodResources, socket_beside
from npu_agent.kubelet.pods import Pods
from npu_agent.outputs.condition import ConditionWriter, Observed
from npu_agent.outputs.deviceplugin import session
from npu_agent.outputs.deviceplugin.session import Plugin, Session
from npu_agent.outputs.dra import support
from npu_agent.outputs.dra.driver import Driver, DriverHost, DriverTiming
from npu_agent.outputs.dra.support import SupportWatch
from npu_agent.outputs.events import Events, TimelineWriter
from npu_agent.outputs.evictions import EvictionInputs, EvictionSettings, Evictor
from npu_agent.outputs.labels.compute import read_machine
from npu_agent.outputs.labels.labeller import Labeller, LabelSettings
from npu_agent.outputs.labels.outputs import output_of
from npu_agent.outputs.prometheus.exposition import Exposition, ExpositionSettings
from npu_agent.outputs.prometheus.own import LoopLag
from npu_agent.outputs.web.history import History
from npu_agent.outputs.web.readers import UNREAD_INTERVAL, Readers
from npu_agent.outputs.web.routes import Router, probes, routes
from npu_agent.outputs.web.server import PortLimits, Server
from npu_agent.vendors import DRA, PROFILE, SPEC, VENDOR

if TYPE_CHECKING:
    from npu_agent.outputs.web.authorization import Authorizer
    from npu_agent.outputs.web.tls import Certificates


Simulation = Callable[[Feed[Mapping[str, frozenset[int]]]], Coroutine[Any, Any, None]]
"""Keeps simulated cards alive; takes the cores that containers hold, by the card's ID."""

_SAMPLE = 1.0
"""Seconds before a reading at which counters that wrap are read, if readings are far apart: load is
known from two samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    """The times of the agent and of its parts, in seconds.

    The DaemonSet's terminationGracePeriodSeconds has room for `HAND_OVER`, `calls` and `LONGEST`.
    """

    calls: float = 10.0
    """At the end, for calls of the kubelet that are under way. A Pod whose Allocate is cut fails
    for good, and a kubelet comes back after a minute to a claim that was not prepared. Most calls
    take milliseconds, or seconds where many Pods start; one that waits longer is given up."""
    end: float = 0.9
    """Then, for the Allocator (0.3 at most) and the sessions to end in order; with the rest the
    process is gone within 1 s."""
    ask_again: float = 60.0
    """Seconds until a node without DRA support is asked again."""
    config: poller.PollTiming = field(default_factory=poller.PollTiming)
    sessions: session.SessionTiming = field(default_factory=session.SessionTiming)
    driver: DriverTiming = field(default_factory=DriverTiming)


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
    simulation: Simulation | None = None
    """Runs the simulated cards below `root`; None: the cards are real."""

    @property
    def hostname(self) -> str:
        """The Node's name, else the host's."""
        return self.node_name or platform.node()


@dataclass(frozen=True, slots=True)
class Common:
    """What every part is built from."""

    host: Host
    poller: Poller
    config: Config
    """The one at the start, for what changes by a restart only."""
    api: Api
    timing: AgentTiming

    @property
    def configs(self) -> Feed[Config]:
        return self.poller.configs

    @property
    def directory(self) -> Path:
        """The kubelet's, for device plugins."""
        return Path(self.config.plugin_dir)

    @property
    def by_cdi(self) -> bool:
        return self.config.allocation.method == "cdi"


@dataclass(frozen=True, slots=True)
class HardwareParts:
    """What reads the cards."""

    inventory: Inventory
    kernel: KernelEvents
    """Not run for simulated cards, which the kernel does not know."""
    readers: Readers
    """Of the pages: they decide how often cards are read."""


def hardware(
    common: Common, recorded: Mapping[str, frozenset[str]], restarts: Counter[str]
) -> HardwareParts:
    """Builds the reader of the cards; `recorded` has those of the agent before this one."""
    simulated = common.host.simulation is not None
    kernel = KernelEvents(Path(driver.directory).name for driver in PROFILE.drivers)
    readers = Readers()
    inventory = Inventory(
        VENDOR(common.host.root, simulated=simulated),
        common.configs.map_with(
            readers.present,
            lambda config, read: replace(_watching(config, read), root=str(common.host.root)),
        ),
        kernel.news,
        restarts=restarts,
        known=recorded,
    )
    return HardwareParts(inventory, kernel, readers)


def _watching(config: Config, read: bool) -> card.ProbeSettings:
    telemetry_interval = config.metrics.interval
    counter_interval = LONGEST_PAUSE
    if not read and config.health.max_temperature is None:
        telemetry_interval = max(telemetry_interval, UNREAD_INTERVAL)
        counter_interval = telemetry_interval - _SAMPLE
    return card.ProbeSettings(
        interval=config.interval,
        health_interval=config.health.interval,
        telemetry_interval=telemetry_interval,
        counter_interval=counter_interval,
        policy=config.health.policy,
        host_nodes=config.containers.device_nodes,
    )


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What the API server knows about this node."""

    watch: NodeWatch
    dra_support: SupportWatch


def node(common: Common) -> NodeParts:
    """Builds the readers of our Node, and of its support of DRA."""
    config = common.config
    name = common.host.node_name
    return NodeParts(
        NodeWatch(common.api, name, common.configs.map(_follows_node)),
        SupportWatch(
            common.api,
            name,
            auto=asks_for(config, "auto", name),
            dra=asks_for(config, "dra", name),
            ask_again=common.timing.ask_again,
        ),
    )


def _follows_node(config: Config) -> bool:
    return (
        config.cordon or config.labels.output == "api" or config.health.condition.type is not None
    )


def allocation(
    common: Common, ledger: Feed[Ledger], inventory: Inventory, node: NodeParts
) -> Allocator:
    """Builds what decides on devices; `ledger` has the record of the agent before this one."""
    configs = common.configs
    directory = common.directory
    root = common.host.root
    name = common.host.node_name
    support = node.dra_support.state
    wishes = configs.map_with(support, partial(_plugin_wishes, name))
    pod_resources = PodResources(
        socket_beside(directory),
        configs.map(lambda config: config.metrics.interval),
        Pods(directory, root),
        ledger,
    )
    cordons = CordonStore(
        node.watch.state.map_with(configs.map(lambda config: config.cordon), _annotation),
        inventory.hardware,
        wishes.map(lambda wishes: wishes.disabled),
        directory,
    )
    pool = ClaimPool(
        DRA,
        frozenset(SPEC.families),
        configs.map_with(support, partial(_dra_wishes, name)),
        inventory.hardware,
    )
    return Allocator(
        PlanInputs(
            snapshots=inventory.hardware,
            wishes=wishes,
            pool=pool,
            cordons=cordons,
            degraded=inventory.degraded,
        ),
        pod_resources=pod_resources,
        specs=cdi.PluginSpecs(root / cdi.DIRECTORY, PROFILE.cdi_kind, by_cdi=common.by_cdi),
        directory=directory,
    )


def _plugin_wishes(node_name: str | None, config: Config, dra: support.Known) -> PluginWishes:
    counts = SPEC.core_counts
    return PluginWishes(
        resources_of(config, counts),
        disabled_for(config, node_name),
        offered_by(config, counts, "device-plugin", node_name, auto=dra.available),
    )


def _dra_wishes(node_name: str | None, config: Config, dra: support.Known) -> DraWishes:
    return DraWishes(
        families=offered_by(config, SPEC.families, "dra", node_name, auto=dra.available),
        decided=not dra.waits,
        disabled=disabled_for(config, node_name),
        by_index=config.dra.device_names == "index",
        partitions=config.dra.partitions,
        impossible=dra.impossible,
    )


def _annotation(own: OwnNode | None, wanted: bool) -> str | None:
    """The cordons as the Node has them; None as long as that is not known."""
    if not wanted:
        return ""
    return None if own is None else own.annotations.get(ANNOTATION, "")


@dataclass(frozen=True, slots=True)
class KubeletParts:
    """What serves the kubelet."""

    ownership: Ownership
    sessions: tuple[Session, ...]
    """Of the device plugin, one a resource."""
    driver: Driver
    """Of DRA."""


def kubelet(common: Common, allocator: Allocator) -> KubeletParts:
    """Builds the sessions of the device plugin and the DRA driver."""
    ownership = Ownership(common.directory, allocator.disowned)
    sessions = (
        Session(
            Plugin(
                resource=resource,
                directory=common.directory,
                socket_name=common.config.socket_name,
                by_cdi=common.by_cdi,
            ),
            allocator,
            ownership,
            common.timing.sessions,
        )
        for resource in allocator.devices
    )
    host = DriverHost(
        node_name=common.host.node_name,
        kubelet_root=common.directory.parent,
        cdi_root=common.host.root / cdi.DIRECTORY,
    )
    return KubeletParts(
        ownership,
        tuple(sessions),
        Driver(allocator.pool, host, allocator, ownership, common.api, common.timing.driver),
    )


@dataclass(frozen=True, slots=True)
class ClusterParts:
    """What is written to the API server about this node."""

    labeller: Labeller | None
    """None without labels in the config, or without a Node."""
    events: Events
    condition: ConditionWriter
    evictor: Evictor


def cluster(
    common: Common,
    inventory: Inventory,
    node: NodeParts,
    allocator: Allocator,
    kubelet: KubeletParts,
    state: Callable[[], AgentState],
) -> ClusterParts:
    """Builds the writers of labels, Events and the Node's condition, and the Evictor.

    Without a Node's name none but the labeller is run.
    """
    name = common.host.node_name or ""
    events = Events(
        api=common.api,
        node_name=name,
        wanted=common.configs.map(lambda config: config.events and bool(name)),
    )
    causes: tuple[Feed[Any], ...] = (
        common.configs,
        inventory.hardware,
        allocator.usages,
        allocator.cordons.cards,
        inventory.degraded,
        node.watch.state,
        node.dra_support.state,
        *(session.status for session in kubelet.sessions),
        kubelet.driver.status,
        kubelet.driver.slices.state,
    )
    observed = Observed(state, causes)
    condition = ConditionWriter(
        api=common.api,
        node_name=name,
        observed=observed,
        type_=common.configs.map(lambda config: config.health.condition.type or ""),
        directory=common.directory,
    )
    evictor = Evictor(
        api=common.api,
        own_pod=common.host.pod,
        inputs=EvictionInputs(
            observed=observed,
            facts=lambda: allocator.facts() if allocator.owned else None,
            settings=common.configs.map(_eviction_settings),
        ),
        due=allocator.evicting,
    )
    return ClusterParts(_labeller(common, inventory, node), events, condition, evictor)


def _eviction_settings(config: Config) -> EvictionSettings:
    return EvictionSettings(config.health.evict, config.health.evict_after)


def _labeller(common: Common, inventory: Inventory, node: NodeParts) -> Labeller | None:
    method = common.config.labels.output
    host = common.host
    output = output_of(method, api=common.api, node_name=host.node_name, host_root=host.root)
    if output is None:
        return None
    return Labeller(
        snapshots=inventory.hardware,
        settings=common.configs.map(_label_settings),
        output=output,
        seen=node.watch.state.map(_labels) if method == "api" else None,
        machine=partial(read_machine, host.root),
    )


def _label_settings(config: Config) -> LabelSettings:
    sets = tuple(SPEC.label_sets[name] for name in config.labels.sets)
    return LabelSettings(sets, config.labels.resync)


def _labels(own: OwnNode | None) -> Mapping[str, str] | None:
    return None if own is None else own.labels


@dataclass(frozen=True, slots=True, kw_only=True)
class WebParts:
    """Pages and metrics, and what they remember."""

    exposition: Exposition
    history: History
    timeline_writer: TimelineWriter
    lag: LoopLag
    certificates: Certificates | None
    """None where the config wants no TLS."""
    authorizer: Authorizer | None
    """None where any client may read the pages."""
    server: Server
    probes: Server
    """A listener for the kubelet alone: clients of the other one cannot block its probes."""


def web(
    common: Common,
    hardware: HardwareParts,
    allocator: Allocator,
    kubelet: KubeletParts,
    cluster: ClusterParts,
    state: Callable[[], AgentState],
) -> WebParts:
    """Builds the two servers and what they show."""
    metrics = common.config.metrics
    inventory = hardware.inventory
    exposition = Exposition(state, common.configs.map(_exposition_settings))
    history = History(inventory.snapshots)
    certificates = _certificates(metrics.tls)
    authorizer = _authorizer(common)
    return WebParts(
        exposition=exposition,
        history=history,
        timeline_writer=_timeline_writer(common, inventory, allocator, kubelet, cluster),
        lag=LoopLag(),
        certificates=certificates,
        authorizer=authorizer,
        server=Server(
            "metrics",
            metrics.address,
            Router(routes(exposition.body, state, history, hardware.readers.touch)),
            certificates=certificates,
            authorizer=authorizer,
        ),
        probes=Server(
            "probes",
            metrics.probes_address,
            Router(probes(state), fresh=0.0),
            PortLimits(silence=2.0),  # the kubelet comes on a new connection for each probe
        ),
    )


def _certificates(config: TlsConfig) -> Certificates | None:
    if config.cert_file is None:
        return None
    from npu_agent.outputs.web import tls

    files = tls.tls_files(config)
    return tls.Certificates(files) if files else None


def _authorizer(common: Common) -> Authorizer | None:
    if common.config.metrics.authorization == "none":
        return None
    from npu_agent.outputs.web.authorization import Authorizer

    return Authorizer(common.api)


def _exposition_settings(config: Config) -> ExpositionSettings:
    schema = SPEC.metric_schemas[config.metrics.schema]
    return ExpositionSettings(schema, config.metrics.pod_labels)


def _timeline_writer(
    common: Common,
    inventory: Inventory,
    allocator: Allocator,
    kubelet: KubeletParts,
    cluster: ClusterParts,
) -> TimelineWriter:
    labeller = cluster.labeller
    return TimelineWriter(
        inventory.hardware,
        inventory.trends,
        allocator.usages,
        [
            (allocator.cordons.state, changes.cordon_entries),
            (cluster.evictor.state, changes.eviction_entries),
            (inventory.trends, changes.trend_entries),
            (inventory.hardware, partial(changes.lost_entries, inventory.recorded)),
            (common.poller.states, changes.config_entries),
            *(
                (session.status, partial(changes.session_entries, subject="resource"))
                for session in kubelet.sessions
            ),
            (kubelet.driver.status, partial(changes.session_entries, subject="dra")),
            *(((labeller.state, changes.label_entries),) if labeller else ()),
        ],
        cluster.events,
    )
