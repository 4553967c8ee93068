"""AgentState: the state of agent and node at one moment, as one frozen value.

It is put together in one place, `npu_agent.agent.agent`. Readiness and problems
(`npu_agent.core.problems`), JSON, HTML and the agent's own metrics are pure functions of it.
Times are seconds of `time.monotonic` unless they say otherwise: the wall clock of a node is
often set right minutes after the start. `AgentState.wall` makes times of day of them.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from npu_agent.core.counts import Counts, DraCounts, Histogram
from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.core.kinds import Message, NamedCard, Problem
from npu_agent.core.ledger import (
    Assignment,
    Footprint,
    PreparedClaim,
    Usage,
    card_of,
    footprints_of,
)
from npu_agent.core.offer import Device, Resource, names
from npu_agent.core.pool import PoolDevice
from npu_agent.core.timeline import SPAN, GoneCard, Timeline
from npu_agent.core.trends import Trends


class SessionPhase(enum.Enum):
    """Phases of a registration at the kubelet."""

    NO_CARDS = "no cards"
    """Nothing to serve, so nothing is registered."""
    STANDBY = "standby"
    """Another agent of this node serves the resource."""
    REGISTERING = "registering"
    """Waiting for the kubelet."""
    REGISTERED = "registered"
    """The kubelet holds our stream open."""
    WAITING = "waiting"
    """It depends on something that is not known yet; `SessionStatus.reason` has what."""
    BLOCKED = "blocked"
    """It cannot be served; `SessionStatus.reason` has why."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatus:
    """A resource's session at the kubelet."""

    resource: str
    phase: SessionPhase
    reason: str = ""
    registrations: int = 0
    """Successful registrations since the start."""
    since: float | None = field(default=None, compare=False)
    """The time of entering this phase; None: at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceState:
    """A resource: its session, its counts, and the devices that are offered."""

    session: SessionStatus
    counts: Counts
    """Goes on counting."""
    devices: tuple[Device, ...] = ()


COUNTERS = frozenset({"sharedCounters", "devices.consumesCounters"})
"""The fields of ResourceSlices by which cards are cut: their counters, and those that a device
consumes."""
TAINTS = "devices.taints"
"""The field by which devices are kept from being allocated."""
INFORMATIVE = "devices.taints.effect None"
"""The effect of informative taints: Kubernetes 1.35."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesState:
    """The state of the node's ResourceSlices, for readiness, pages and metrics."""

    published: bool = False
    """Whether all of the devices are in the API server, as far as is known."""
    generation: int = 0
    """Of the pool."""
    slices: int = 0
    devices: int = 0
    incomplete: bool = False
    """Whether the API server has fewer slices of the pool than they say: the scheduler allocates
    nothing of such a pool."""
    foreign: str = ""
    """Names of slices that another client made for this driver and node, in another pool."""
    trouble: str | None = None
    """Why they cannot be published, or not be watched, with the remedy."""
    dropped: tuple[str, ...] = ()
    """The fields that the API server drops, such as ``devices.taints``: a feature is off there."""
    writes: int = 0
    """Slices written or deleted so far."""

    @property
    def uncounted(self) -> bool:
        """Whether the API server drops counters, so that cards can only be offered whole."""
        return not COUNTERS.isdisjoint(self.dropped)

    @property
    def untainted(self) -> bool:
        """Whether the API server drops taints, so that devices with one are left out."""
        return TAINTS in self.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class DraState:
    """A DRA driver: its registration, its counts, and what it offers and has prepared."""

    session: SessionStatus
    """Under the driver's name."""
    counts: DraCounts
    """Goes on counting."""
    slices: SlicesState
    devices: tuple[PoolDevice, ...] = ()
    """What is offered."""
    claims: tuple[PreparedClaim, ...] = ()
    """Those that are prepared."""

    @property
    def name(self) -> str:
        return self.session.resource


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiState:
    """The identity with which the agent reads from the API server."""

    as_node: bool
    """As its Node (constrained impersonation); False: by its account's own rights."""
    refusal: str = ""
    """Why not as its Node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigState:
    """The state of the config file."""

    generation: int = 1
    """The number of the config in force, from 1."""
    loaded_at: float
    """When the file was last found good."""
    errors: tuple[str, ...] = ()
    """What is wrong with the file now, a line each; empty if it is good."""
    rejected: int = 0
    """How many bad versions of the file there were."""
    waiting: tuple[str, ...] = ()
    """The keys whose new value waits for a restart."""

    @property
    def error(self) -> str | None:
        """All that is wrong with the file now; None if it is good."""
        return "\n".join(self.errors) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelState:
    """The labels that should be on the Node, and whether they are."""

    output: Literal["api", "nfd"]
    """The config's labels.output."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The wanted labels, by key."""
    in_place: bool = False
    """Whether they were in place at the last check."""
    error: str | None = None
    """Why they are not, with the remedy; None while nothing is wrong."""
    applied_at: float | None = None
    """When they were last written. None: not by this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionState:
    """The condition of the Node."""

    type: str
    """``example.com/NPUReady``: the config's health.condition.type."""
    status: bool | None = None
    """As it was written last; None: this process has neither found nor written one."""
    reason: str = ""
    message: str = ""
    error: str | None = None
    """Why it cannot be written, with the remedy; None while nothing is wrong."""


@dataclass(frozen=True, slots=True)
class EvictedPod:
    """A Pod that was evicted because its card had failed, or that was left alone."""

    pod: str
    """``namespace/pod``."""
    uid: str
    card: NamedCard
    seconds: int
    """For which its card had failed."""
    left: bool = False
    """Whether it was left: its owner would start it again on this Node."""
    of_daemon_set: bool = False
    """Of one that was left; else it is a static Pod."""


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """A Pod on a failed card that is to be evicted, and is not yet."""

    pod: str
    """``namespace/pod``."""
    card: NamedCard
    why: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionState:
    """What became of the Pods whose cards have failed."""

    evicted: tuple[EvictedPod, ...] = ()
    """The last ones, and those that were left; the latest comes last."""
    waiting: tuple[WaitingPod, ...] = ()
    refusal: str = ""
    """Why the agent can evict no Pod, with the remedy; empty: it can, or need not."""
    results: Mapping[str, int] = field(default_factory=dict)
    """Attempts, by result: ``evicted``, ``refused`` by a budget, ``left``, ``failed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsState:
    """The certificate of the public port."""

    expires_at: float | None = None
    """Of the one in force, by the wall clock; None: there was no good one yet, and the port is
    closed."""
    error: str | None = None
    """Why the files that are there now are refused; None if they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """How a person runs `npu-agent` as this agent was started."""

    pod: str = ""
    """The agent's Pod, ``namespace/name``; empty: it runs in none."""
    config_file: str = ""
    """Empty: it has none."""
    host_root: str = "/"

    def command(self, *words: str) -> str:
        """The command line for a reader who has kubectl, or for the host that the agent runs on.

        The environment of the agent's Pod has what elsewhere are options.
        """
        if self.pod:
            namespace, _, pod = self.pod.partition("/")
            return shlex.join(("kubectl", "-n", namespace, "exec", pod, "--", "npu-agent", *words))
        if words[0] == "doctor" and self.config_file:
            words = (*words, f"--config-file={self.config_file}")
        if self.host_root != "/" and words[0] in ("doctor", "info"):
            words = (*words, f"--host-root={self.host_root}")
        return shlex.join(("npu-agent", *words))

    def service(self, verb: str, card: str, *options: str, node: str) -> str:
        """The command that takes a card out of service (``cordon``) or back (``uncordon``)."""
        where = () if self.pod else (f"--node={node}",)
        return self.command(verb, card, *options, *where)

    def on_node(self, command: str, node: str) -> str:
        """The command line that runs a command in a shell of the node, by kubectl alone.

        The Pod that it makes runs on the node's root directory, and has the agent's own image: it
        is on the node, and has chroot. It waits for Enter, as kubectl then says: what is printed
        before kubectl is attached would be lost.
        """
        if not self.pod:
            return command
        namespace, _, pod = self.pod.partition("/")
        get = shlex.join(("kubectl", "-n", namespace, "get", "pod", pod))
        debug = shlex.join(("kubectl", "-n", namespace, "debug", f"node/{node}"))
        image = f"$({get} -o jsonpath='{{.spec.containers[0].image}}')"
        shell = shlex.join(("chroot", "/host", "sh", "-c", f"read _; {command}"))
        return f"{debug} -it --profile=sysadmin --image={image} -- {shell}"


@dataclass(frozen=True, slots=True)
class GoneDevice:
    """A device that a container holds, and whose card is gone."""

    assignment: Assignment
    card_id: str
    """The device's own ID where its card left before this agent started."""
    name: str
    """The former name of the card, or again the device's ID."""


@dataclass(frozen=True, kw_only=True)
class AgentState:
    """The state of the agent and its node. Its counters may go on counting."""

    version: str
    node: str | None
    """This Node's name, if known."""
    hostname: str
    """The Node's name, else the host's."""
    invocation: Invocation = field(default_factory=Invocation)
    started_at: float
    now: float
    """By the wall clock: `time.time`."""
    monotonic: float
    """`now` by the clock of all other times."""
    snapshot: Snapshot
    usages: tuple[Usage, ...] = ()
    """The usages of present cards, from the ledger."""
    assignments: tuple[Assignment, ...] = ()
    """As the kubelet reports them: of any resource of the node."""
    assignments_error: str | None = None
    """Why the kubelet does not report them; None if it does."""
    resources: tuple[ResourceState, ...] = ()
    kubelet_restarts: int = 0
    """Times that registrations at the kubelet were lost and made again; it never falls."""
    dra: tuple[DraState, ...] = ()
    """The DRA drivers that have something to serve."""
    wanted: tuple[Resource, ...] = ()
    """The resources that the config asks for, with the families that the device plugin offers."""
    auto_pending_reason: str = ""
    """Why the API of `allocation.api: auto` is not known yet; empty: it is."""
    cordons: Mapping[str, str] = field(default_factory=dict)
    """The cordoned cards and the reasons, by ID."""
    held_by: Mapping[str, str] = field(default_factory=dict)
    """The possible holders of cordoned cards, by ID; free cards are left out."""
    expected_cards: int | None = None
    """The config's health.expectedCards."""
    recorded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The cards that the record of the agent before this one has: their identities by ID."""
    first_ids: Mapping[str, str] = field(default_factory=dict)
    """By names that people use (``npu3``), the IDs of the cards that had them first."""
    cordons_lost: Mapping[str, str] = field(default_factory=dict)
    """Names in the Node's annotation that match no card here, with the reasons."""
    cordons_wrong: tuple[Problem, ...] = ()
    """What is wrong with the Node's annotation."""
    api_error: str | None = None
    """Why the API server does not answer at all; None while it does."""
    node_error: str | None = None
    """Why changes of the Node are not seen, with the remedy; None while nothing is wrong."""
    reads: ApiState | None = None
    """The identity at the API server; None: not yet, or by a kubeconfig."""
    disabled: frozenset[str] = frozenset()
    """Names of the cards that the config keeps out of service here, in lower case."""
    config: ConfigState
    stale_after: float
    """Seconds after which a reading is stale: see `stale_after`."""
    labels: LabelState | None = None
    """None: labels are switched off."""
    condition: ConditionState | None = None
    """None: the Node's condition is switched off."""
    evictions: EvictionState = field(default_factory=EvictionState)
    maintenance: str = ""
    """The maintenance of the Node, for people; empty: none."""
    trends: Trends = field(default_factory=Trends)
    """The trends of cards."""
    timeline: Timeline = field(default_factory=Timeline)
    """The events of a day, and the cards that are gone."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Restarts of each part after a failure."""
    lag: Histogram
    """Seconds that the event loop was late."""
    labels_applied: Mapping[str, int] = field(default_factory=dict)
    """Attempts to apply the Node's labels, by result."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Events on the Node, by result."""
    reading_failures: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    """Failed probes and readings, by family, card (``npu0``) and reason. Reasons are few."""
    page_failures: Mapping[str, int] = field(default_factory=dict)
    """Families left out of the metrics page, by name."""
    kernel_error: str = ""
    """Why the kernel's reports of cards that come and go are not heard; empty: no fault."""
    cdi_error: str | None = None
    """Why the CDI specs cannot be written; None while they can, or are not wanted."""
    tls: TlsState | None = None
    """None: the public port is without TLS."""
    authorizations: Mapping[str, int] = field(default_factory=dict)
    """Requests for pages, by result; empty where any client may read them."""
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Connections ended for newer ones, by listener (``metrics``, ``probes``) and reason."""

    @cached_property
    def gone(self) -> tuple[GoneDevice, ...]:
        """The devices of our resources, and of prepared claims, whose card is gone."""
        ours = {resource.session.resource for resource in self.resources}
        present = {usage.assignment for usage in self.usages}
        cards = [gone.state.card for gone in self.timeline.gone]
        devices = [
            self._gone_device(assignment, footprints_of(assignment.device, cards))
            for assignment in self.assignments
            if assignment.resource in ours and assignment not in present
        ]
        devices += (
            self._gone_device(claim.assignment(device, pod), {device.footprint})
            for driver in (self.dra if self.snapshot.complete else ())
            for claim in driver.claims
            for device in claim.devices
            if not device.admin and card_of(device.footprint, self.snapshot.cards) is None
            for pod in claim.pods
        )
        return tuple(devices)

    def _gone_device(self, assignment: Assignment, footprints: Iterable[Footprint]) -> GoneDevice:
        for gone in self.timeline.gone:
            if any(card_of(footprint, [gone.state]) for footprint in footprints):
                return GoneDevice(assignment, gone.state.id, gone.state.card.name)
        return GoneDevice(assignment, assignment.device, assignment.device)

    @cached_property
    def pods_of_gone(self) -> Mapping[str, tuple[str, ...]]:
        """The Pods that hold a device whose card is gone, by `GoneDevice.card_id`."""
        pods: dict[str, dict[str, None]] = {}
        for device in self.gone:
            pods.setdefault(device.card_id, {})[device.assignment.pod_name] = None
        return {card_id: tuple(names) for card_id, names in pods.items()}

    @cached_property
    def missing(self) -> tuple[GoneCard, ...]:
        """Returns the cards that left within a day and whose place is empty."""
        taken = {card.card.place for card in self.snapshot.cards}
        return tuple(
            gone
            for gone in self.timeline.gone
            if gone.state.card.place not in taken and self.monotonic - gone.since < SPAN
        )

    def cordon_of_gone(self, gone: GoneCard) -> str | None:
        """Why a card that left was cordoned; None: it was not."""
        called = names(gone.state)
        lost = self.cordons_lost.items()
        return next((reason for name, reason in lost if name.lower() in called), None)

    @cached_property
    def _usages_by_card(self) -> Mapping[str, tuple[Usage, ...]]:
        by_card: dict[str, list[Usage]] = {}
        for usage in sorted(self.usages, key=lambda usage: usage.cores):
            by_card.setdefault(usage.card_id, []).append(usage)
        return {card: tuple(usages) for card, usages in by_card.items()}

    def usages_of(self, card: CardState) -> tuple[Usage, ...]:
        """Returns the usages of a card, sorted by cores."""
        return self._usages_by_card.get(card.id, ())

    def pods_of(self, cards: Iterable[CardState]) -> tuple[str, ...]:
        """Returns the Pods that hold any of the cards, ``namespace/pod``, each once."""
        held = (usage.assignment.pod_name for card in cards for usage in self.usages_of(card))
        return tuple(dict.fromkeys(held))

    def is_disabled(self, card: CardState) -> bool:
        return not names(card).isdisjoint(self.disabled)

    def is_stale(self, card: CardState) -> bool:
        """Whether the card's last reading is too old."""
        reading = card.reading
        return reading is not None and self.monotonic - reading.at > self.stale_after

    def wall(self, at: float) -> float:
        """Converts a past time of `time.monotonic` to the wall clock."""
        return self.now - max(0.0, self.monotonic - at)

    def withheld(self, resource: ResourceState) -> tuple[Device, ...]:
        """Returns unhealthy devices whose card is neither unhealthy nor cordoned."""
        fenced = {card.id for card in self.snapshot.cards if is_fenced(card)} | {*self.cordons}
        return tuple(
            device
            for device in resource.devices
            if not device.healthy and device.card_id not in fenced
        )


def is_fenced(card: CardState) -> bool:
    return card.health.state is HealthState.UNHEALTHY


def stale_after(interval: float) -> float:
    """Seconds after which a reading is stale, with `interval` seconds between two readings."""
    return max(10.0, 3 * interval)
