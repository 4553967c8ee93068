"""Hardware as the rest of the agent sees it: frozen values, no I/O.

A card is one physical NPU (``npu0``), a core one processing element (PE) of it, a reading its
telemetry at one moment. A device is what the kubelet sees: `npu_agent.core.offer`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


@dataclass(frozen=True, slots=True, order=True)
class CoreRange:
    """Neighbouring cores `first` to `last`, both included and counted from 0."""

    first: int
    last: int

    def __str__(self) -> str:
        """Returns the form that the driver uses in node names: ``0`` or ``0-3``."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def includes(self, other: CoreRange) -> bool:
        return self.first <= other.first and other.last <= self.last

    def overlaps(self, other: CoreRange) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a container is given a card: device nodes, environment and CDI kind of its vendor.

    Nodes, relative to /dev, that such a card may have; `Card.nodes` are those that exist.
    """

    shared_nodes: tuple[str, ...]
    """For every holder of a core."""
    whole_nodes: tuple[str, ...]
    """For the holder of the whole card."""
    core_nodes: tuple[tuple[CoreRange, str], ...]
    """Of single and of fused cores, the narrow ones first."""
    optional_nodes: tuple[str, ...] = ()
    """For every holder of a core, from drivers that have them."""
    environment: tuple[tuple[str, str], ...]
    """Variables, each with the text for one range of cores, of which several are joined by commas:
    ``("ANVIL_CORES", "0:{cores}")``."""
    whole_environment: tuple[tuple[str, str], ...] = ()
    """Variables that have another text for the whole card than for the ranges that cover it."""
    cdi_kind: str
    """``example.com/npu``: the kind of the card's CDI devices."""

    def nodes(self, cores: CoreRange | None = None) -> tuple[str, ...]:
        if cores is None:
            inside = [node for _, node in self.core_nodes]
            whole = self.whole_nodes
        else:
            inside = [node for covered, node in self.core_nodes if cores.includes(covered)]
            whole = ()
        return (*whole, *self.shared_nodes, *self.optional_nodes, *inside)

    @property
    def required_nodes(self) -> tuple[str, ...]:
        """The nodes that every such card has."""
        return tuple(node for node in self.nodes() if node not in self.optional_nodes)


Oddity = Literal["ProductUnknown", "VersionUnreadable"]
"""What is odd about a card that is served all the same: it was recognised by its nodes; a version
has no order that is known. Kinds of notes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The properties of a card that do not change while it is bound to its driver.

    Texts are as the driver gives them, stripped; None: absent, empty or unreadable.
    """

    vendor: str
    """``acme``: the name of its vendor's folder in `npu_agent.vendors`."""
    family: str
    """``anvil``: as in config files; unique among all vendors."""
    title: str
    """For people: ``Acme Anvil``."""
    core_count: int
    access: Access
    index: int
    """The host's number of the card, N of ``npuN``."""
    product: str
    """``anvil``, ``anvilB0``: what is sold under a name of its own."""
    uuid: str | None = None
    serial: str | None = None
    pci_bus_id: str | None = None
    """PCI address with domain, e.g. ``0000:6d:00.0``."""
    dev: str | None = None
    """Character device ``major:minor`` of the management node."""
    driver_version: str | None = None
    """e.g. ``1.9.2, 3def9c2``: version, then the build's commit."""
    firmware_version: str | None = None
    numa_node: int | None = None
    memory: int | None = None
    """Bytes that its cores have together."""
    switches: tuple[str, ...] = ()
    """What is above the card on the PCI bus, from the root complex (``pci0000:00``) down."""
    lanes: tuple[int, int] | None = None
    """Of its PCIe link: those in use, and those that both of its ends can have."""
    link_speed: tuple[float, float] | None = None
    """GT/s of each lane: now, and what both ends can do."""
    nodes: frozenset[str] = frozenset()
    """Device nodes that exist, relative to /dev: ``npu0pe0-1``, ``anvil/npu0mgmt``."""
    simulated: bool = False
    """True for a simulated card: its containers get /dev/null under each node name."""
    oddities: tuple[tuple[Oddity, str], ...] = ()
    """Each with the driver's text."""
    kept: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What is computed from it with every claim that comes or goes, by the module that does: a
    cache of its own would keep cards that have left."""

    @property
    def name(self) -> str:
        return f"npu{self.index}"

    @property
    def all_cores(self) -> CoreRange:
        return CoreRange(0, self.core_count - 1)

    @property
    def key(self) -> tuple[str, int]:
        """Unique at one moment: numbers are only unique within a family."""
        return (self.family, self.index)

    @property
    def place(self) -> str:
        """The place in the host; only one card can be there at a time."""
        return self.pci_bus_id or self.name

    @property
    def switch(self) -> str | None:
        """The PCIe switch above the card, by its upstream port: ``0000:17:00.0``.

        None of a card right below a root port.
        """
        # Root complex, root port, then for each switch its upstream port and the downstream port
        # that is the card's alone.
        return self.switches[-2] if len(self.switches) > 2 else None

    @property
    def identities(self) -> frozenset[str]:
        """Identifiers of the card: ``uuid:...``, ``serial:...``, ``pci:...``."""
        known: frozenset[str] | None = self.kept.get("identities")
        if known is None:
            texts = zip(_KINDS, (self.uuid, self.serial, self.pci_bus_id), strict=True)
            known = self.kept["identities"] = frozenset(f"{kind}:{t}" for kind, t in texts if t)
        return known

    def as_json(self) -> dict[str, str | int | bool | None]:
        """The JSON of a card for status.json, `info -o json` and other programs."""
        return {
            "name": self.name,
            "family": self.family,
            "product": self.product,
            "uuid": self.uuid,
            "serial": self.serial,
            "pci_bus_id": self.pci_bus_id,
            "driver_version": self.driver_version,
            "firmware_version": self.firmware_version,
            "numa_node": self.numa_node,
            "simulated": self.simulated,
        }

    def same_as(self, other: Card) -> bool:
        """False only if the best identifier that both report differs."""
        return same_card(self.identities, other.identities) is not False


class SensorKind(enum.Enum):
    """The value is the unit of `Sensor.value`."""

    TEMPERATURE = "m°C"
    POWER = "µW"
    VOLTAGE = "mV"
    CURRENT = "mA"


@dataclass(frozen=True, slots=True)
class Sensor:
    """An hwmon value of a card, in the unit that its kind names."""

    kind: SensorKind
    label: str
    """The driver's label in lower case, else the sensor's index."""
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreReading:
    """The state of a core at one moment; None where the driver does not report it."""

    core: int
    utilization: float | None = None
    """Per cent of its cycles spent on tasks since the last reading; 0: not in use; None:
    unknown."""
    frequency: int | None = None
    cycles: int | None = None
    task_cycles: int | None = None
    """Of its cycles, those spent on tasks; some counters start again from 0 at 2**32."""
    dram_total: int | None = None
    """Bytes of the card's memory that the core's user may take."""
    dram_used: int | None = None
    """Bytes of it taken."""
    source: CoreRange | None = None
    """Whose counters these are: the core's own, or those of fused cores, counted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a card may take and do; None where the driver does not say."""

    power: float | None = None
    """W."""
    default_power: float | None = None
    """W: its power limit if no one has set another."""
    clock: int | None = None
    """MHz."""
    slowdown: float | None = None
    """°C at which the driver slows the card down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A card's telemetry at one moment. What could not be read is left out, never guessed."""

    at: float
    """When, in seconds of `time.monotonic`."""
    alive: bool | None = None
    """None: the driver does not say."""
    uptime: int | None = None
    """Seconds since the card's firmware started."""
    errors: tuple[tuple[str, int], ...] = ()
    """Error counters by normalised name (``axi_post_error``), in the driver's order; empty: the
    driver has none."""
    error_text: str | None = None
    """What the driver says of errors in a form that is not known."""
    throttle: tuple[str, ...] | None = None
    """Why it slows the card down now: ``app_power_cap``; None: it does not say."""
    throttled: tuple[tuple[str, int], ...] = ()
    """How often each of them has begun in these readings."""
    limits: Limits = Limits()
    sensors: tuple[Sensor, ...] = ()
    cores: tuple[CoreReading, ...] = ()
    """Sorted by core; empty: the driver has none."""

    def temperature(self) -> float | None:
        return self._highest(SensorKind.TEMPERATURE, 1_000)

    def power(self) -> float | None:
        """The total power in W: the largest power sensor (a total is never below its parts)."""
        return self._highest(SensorKind.POWER, 1_000_000)

    def _highest(self, kind: SensorKind, per_unit: int) -> float | None:
        values = [sensor.value for sensor in self.sensors if sensor.kind is kind]
        return max(values) / per_unit if values else None


class HealthState(enum.Enum):
    """The health of a card. Unknown never fences: the driver just does not say."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Cause(enum.Enum):
    """Causes of an unhealthy card: code decides on these, people read the reason."""

    DEAD = "dead"
    NODES = "nodes"
    HANGS = "hangs"
    """A read does not return."""
    NONSENSE = "nonsense"
    """The driver answers with an error or nonsense."""
    HOT = "hot"
    """It is hotter than the config allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Why, and since when (seconds of `time.monotonic`)."""

    state: HealthState
    reason: str
    since: float
    cause: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """A card in a Snapshot: what it is, and how it is."""

    id: str
    """Stable over restarts and renumbering: the UUID, else serial, else PCI address, else name."""
    card: Card
    health: Health
    reading: Reading | None = None
    host_nodes: tuple[str, ...] = ()
    """Nodes of the host that every container with a device gets too: ``/dev/dma_heap/system``."""


@dataclass(frozen=True, slots=True)
class SkippedDevice:
    """Something that looked like a card and is not served, and why."""

    entry: str
    """Where it was seen, e.g. ``/sys/class/anvil/npu3``."""
    reason: str
    unread: bool = False
    """It may be a card: it could not be read, and is tried again."""
    sample_of: str | None = None
    """The family of which it is an FPGA sample."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The hardware of a host at one moment; every output is computed from it."""

    cards: tuple[CardState, ...] = ()
    skipped: tuple[SkippedDevice, ...] = ()
    complete: bool = False
    """Whether cards were searched for, and every card of the first search was read or does not
    answer. Before that no output may act as if there were no cards."""
    missing_nodes: tuple[str, ...] = ()
    """Nodes of the host that containers should get, and that are no device nodes on it."""

    def without_readings(self) -> Snapshot:
        """A copy without the values that change all the time."""
        return replace(self, cards=tuple(replace(state, reading=None) for state in self.cards))


def same_card(one: frozenset[str], other: frozenset[str]) -> bool | None:
    """Whether both identify one card, by the best kind that both have; None: neither is known."""
    texts = by_kind(one)
    others = by_kind(other)
    return next(
        (texts[kind] == others[kind] for kind in _KINDS if kind in texts and kind in others), None
    )


@lru_cache(maxsize=256)  # an Allocate compares its devices with all that are held
def by_kind(identities: frozenset[str]) -> dict[str, str]:
    """`Card.identities` as a mapping, not to be changed: ``{"uuid": ...}``."""
    parts = (identity.partition(":") for identity in identities)
    return {kind: text for kind, _, text in parts}


_KINDS = ("uuid", "serial", "pci")
"""What identifies a card, the best first."""
