"""The interface of a vendor of cards, its values, and its words for labels, metrics and config.

A vendor's folder in `npu_agent.vendors` has one class with these verbs, an object of it for each
host's root. All but the tables are blocking I/O that may hang: `npu_agent.inventory` calls them on
threads.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from npu_agent.core.hardware import Card, CoreRange, CoreReading, Reading, SensorKind
from npu_agent.core.pool import DraSpec

OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a read for which this process or the host is to blame, not a card. The verbs raise an
OSError with one of them, and take no file for absent."""


class NotServedError(Exception):
    """An entry that is not a card we serve; the message says why.

    Attributes:
        sample: whether it is an FPGA sample of the family.
    """

    def __init__(self, message: str, *, sample: bool = False) -> None:
        super().__init__(message)
        self.sample = sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A place where a card of a family may be."""

    family: str
    index: int
    path: str
    """On this machine, i.e. below the host root."""
    inode: int
    """A reloaded driver makes a new entry, with another inode."""
    counters_wrap: bool
    """Whether its counters start again from 0 at 2**32, and have to be read often while in use."""

    @property
    def key(self) -> tuple[str, int]:
        return (self.family, self.index)

    @property
    def name(self) -> str:
        return f"npu{self.index}"


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a card works, at one moment."""

    alive: bool | None
    """None: the driver does not say."""
    reason: str
    """Why it is not alive, for people: ``alive says 0``."""
    nodes: frozenset[str]
    """Those that exist now, as `Card.nodes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelDriver:
    """The driver of a family, as a host shows it."""

    family: str
    title: str
    directory: str
    """Below the host's root: there once the driver is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Signs of a vendor's cards outside its driver, for `doctor` and `verify`."""

    title: str
    pci: str
    """Its PCI vendor ID: ``1a2b``."""
    plugins: str
    """A part of the names of its own device plugins' sockets and DaemonSets."""
    drivers: tuple[KernelDriver, ...]
    nodes: tuple[str, ...]
    """Its device nodes, as globs below /dev."""
    identities: tuple[str, ...]
    """Names of the drivers' files that tell one card from all others in the world."""
    files: tuple[str, ...]
    """Names of all drivers' files that the vendor's folder reads, as globs."""
    environment: tuple[tuple[str, str], ...]
    """The variables that say which cores a container has, with the form of each item:
    ``("ANVIL_CORES", "{n}:{cores}")``; ``{n}`` is the card's number."""
    whole_environment: tuple[tuple[str, str, CoreRange], ...]
    """Variables whose items may name a whole card, with the form and the cores that it names."""
    cdi_kind: str
    """As `Access.cdi_kind`."""
    io_uring: tuple[str, ...]
    """Families whose jobs cannot start without io_uring."""
    huge_pages: int
    """Of 2 MiB: how many the vendor advises for these families."""
    host_nodes: tuple[tuple[str, str], ...]
    """Nodes of the host below /dev that some jobs on these families open, and which do."""


class LabelSource(enum.Enum):
    """Sources of a label's value."""

    COUNT = "cards installed, healthy or not"
    FAMILY = "the families of the cards"
    PRODUCT = "the products of the cards"
    DRIVER = "the versions of the driver"
    FIRMWARE = "the versions of the firmware"
    MACHINE_VENDOR = "who made the machine"
    MACHINE_NAME = "what its maker calls the machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label of a set."""

    key: str
    """Without the prefix of its set."""
    source: LabelSource
    part: str = "version"
    """Of a version: ``version``, ``major``, ``minor``, ``patch``, ``prerelease`` or ``commit``."""
    named: Callable[[str], str] = str
    """What the set calls a family or product."""
    sample: Callable[[str], str] | None = None
    """What it calls an FPGA sample of a family; None: samples are left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelSet:
    """One generation of label names."""

    about: str
    """For people: where it comes from."""
    prefix: str
    labels: tuple[Label, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(sorted(self.prefix + label.key for label in self.labels))


class MetricSource(enum.Enum):
    """Sources of a metric's value."""

    ALIVE = "1 or 0, as the driver says"
    UPTIME = "seconds since the firmware started"
    ERRORS = "error counters, by kind"
    THROTTLE = "1 or 0, by reason for which the driver slows the card down"
    THROTTLED = "how often each of them has begun"
    POWER_LIMIT = "W that the card may take"
    SLOWDOWN = "°C at which its driver slows it down"
    LINK_LANES = "lanes of its PCIe link that are in use"
    LINK_SPEED = "GT/s of each of them"
    SENSORS = "the sensors of one kind, by label"
    UTILIZATION = "per cent of a core's cycles spent on tasks"
    FREQUENCY = "a core's clock in MHz"
    DRAM_TOTAL = "bytes that the user of a core may take"
    DRAM_USED = "bytes that the user of a core has taken"
    CYCLES = "cycles that a core has counted"
    TASK_CYCLES = "those of them spent on tasks"
    INFO = "what the card is, as labels"
    HEALTH = "the state of health, as a label"
    ASSIGNED = "the container that holds cores, as labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricName:
    """A family of metrics."""

    name: str
    """As queries spell it, with a counter's ``_total``."""
    help: str
    """One sentence for people, which names the unit."""
    source: MetricSource
    kind: Literal["gauge", "counter"] = "gauge"
    sensors: SensorKind | None = None
    """Of which kind, if its source is sensors."""
    per_unit: float = 1
    """By what values, in the unit of `MetricSource` or `SensorKind`, are divided."""
    unproven: tuple[str, ...] = ()
    """Families whose driver has it in a file of a format that is not public: a guess."""

    @property
    def text(self) -> str:
        if not self.unproven:
            return self.help
        families = ", ".join(self.unproven)
        return f"{self.help} Unproven for {families}: its driver's format is not public."


@dataclass(frozen=True, kw_only=True, eq=False)
class MetricSchema:
    """One generation of metric names and units."""

    about: str
    """For people: its units."""
    metrics: tuple[MetricName, ...]
    """In the order of the page."""
    renamed: Mapping[str, str]
    """Sensors that have another name than the driver's label."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VendorSpec:
    """A vendor's words. Values by name, as config files have it."""

    families: Mapping[str, tuple[int, ...]]
    """By family, how many cores a device can have; the most is the whole card."""
    resource_name: str
    socket_name: str
    label_sets: Mapping[str, LabelSet]
    label_set: str
    """The default of labels.sets."""
    metric_schemas: Mapping[str, MetricSchema]
    metric_schema: str
    """The default of metrics.schema."""
    nodes: tuple[str, ...]
    """What the paths of its device nodes below /dev begin with."""
    condition: str
    """The usual type of the Node's condition."""

    @property
    def core_counts(self) -> dict[str, int]:
        return {family: max(widths) for family, widths in self.families.items()}


class Vendor(Protocol):
    """The cards of one vendor on one host."""

    spec: ClassVar[VendorSpec]
    """What config files, labels and metrics call things."""
    dra: ClassVar[DraSpec]
    """What DRA calls them."""
    profile: ClassVar[Profile]

    def __init__(self, root: Any, *, simulated: bool = False) -> None:
        """`root` is the path where the host's ``/`` is seen; `simulated` is for `Card`."""

    @property
    def place(self) -> str:
        """The directory that lists its cards, for messages: ``/sys/class``."""

    def scan(self) -> tuple[Entry, ...]:
        """Every place where a card may be, sorted by number, family and path; raises OSError."""

    def identify(self, entry: Entry) -> Card:
        """Identifies the card at `entry`.

        Raises:
            NotServedError: it is none that we serve.
            OSError: it does not let us read its type.
        """

    def probe(self, entry: Entry) -> Probe:
        """Whether the card at `entry` works, and which nodes it has; cheap, as it is asked often.

        Raises:
            OSError: the driver refuses to say.
            ValueError: it answers nonsense; the message says what, for people.
        """

    def read(self, entry: Entry, card: Card) -> Reading:
        """The telemetry of `card`, which is at `entry`; what cannot be read is left out."""

    def read_cores(self, entry: Entry) -> tuple[CoreReading, ...]:
        """The counters of each core of which the driver says something.

        `CoreReading.utilization` is 0 for a core that is not in use, else None.
        """

    def pci_addresses(self) -> frozenset[str]:
        """The addresses of all cards that its drivers show, also of those that are not served.

        Raises:
            OSError: they cannot be listed or read.
        """

    def given(self) -> tuple[Card, ...]:
        """A container's view: cards with nodes in /dev; only family, number and nodes."""
