"""What the rest of the agent knows of hardware: frozen values, no I/O.

Words: a card is one physical NPU (``npu0``); a core is one processing element (PE) of it; a reading
is a card's telemetry at one moment. A device, what the kubelet sees, is the plugin's word: see
`npu_agent.core.offer`.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True, order=True)
class CoreRange:
    """Neighbouring cores of a card, `first` to `last`, both included and counted from 0."""

    first: int
    last: int

    def __str__(self) -> str:
        """As the driver writes it in node names: ``0`` or ``0-3``."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def includes(self, other: CoreRange) -> bool:
        """Whether every core of `other` is one of these."""
        return self.first <= other.first and other.last <= self.last

    def overlaps(self, other: CoreRange) -> bool:
        """Whether the two have a core in common."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a container is given a card: device nodes, environment and CDI kind of its vendor.

    Paths of nodes are relative to /dev. They are the nodes that a card of this family and number
    may have; `Card.nodes` are those that exist.
    """

    shared_nodes: tuple[str, ...]
    """What every holder of a core needs."""
    whole_nodes: tuple[str, ...]
    """What only the holder of the whole card gets."""
    core_nodes: tuple[tuple[CoreRange, str], ...]
    """The nodes of single and of fused cores, the narrow ones first."""
    environment: tuple[tuple[str, str], ...]
    """Variables, each with the text for one range of cores: ``("ANVIL_CORES", "0:{cores}")``.
    The texts of several ranges are joined by commas."""
    cdi_kind: str
    """``example.com/npu``: the kind of the card's CDI devices."""

    def nodes(self) -> tuple[str, ...]:
        """Every node that the card may have."""
        return (*self.shared_nodes, *self.whole_nodes, *(node for _, node in self.core_nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a card is: everything about it that does not change while it is bound to its driver.

    Texts are as the driver gives them, stripped; None stands for absent, empty or unreadable.
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
    switches: tuple[str, ...] = ()
    """What is above the card on the PCI bus, from the root complex (``pci0000:00``) down."""
    nodes: frozenset[str] = frozenset()
    """Device nodes that exist, relative to /dev: ``npu0pe0-1``, ``anvil/npu0mgmt``."""

    @property
    def name(self) -> str:
        """``npu0``: what people and the driver call it."""
        return f"npu{self.index}"

    @property
    def all_cores(self) -> CoreRange:
        """Every core of the card."""
        return CoreRange(0, self.core_count - 1)

    @property
    def key(self) -> tuple[str, int]:
        """Tells the cards of one moment apart: numbers are only unique within a family."""
        return (self.family, self.index)

    @property
    def identities(self) -> frozenset[str]:
        """What identifies the card wherever it is: ``uuid:...``, ``serial:...``, ``pci:...``."""
        return _identities(self.uuid, self.serial, self.pci_bus_id)

    def as_json(self) -> dict[str, str | int | None]:
        """What status.json, `info -o json` and all that shows a card to programs have of it."""
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
        }

    def same_as(self, other: Card) -> bool:
        """Whether both are one card, as far as they say: two that say nothing may well be."""
        return _same(self.identities, other.identities) is not False


@lru_cache(256)  # asked for with each device that is compared
def _identities(*texts: str | None) -> frozenset[str]:
    return frozenset(f"{kind}:{text}" for kind, text in zip(_KINDS, texts, strict=True) if text)


class SensorKind(enum.Enum):
    """What a sensor measures; the value names the unit of `Sensor.value`."""

    TEMPERATURE = "m°C"
    POWER = "µW"
    VOLTAGE = "mV"
    CURRENT = "mA"


@dataclass(frozen=True, slots=True)
class Sensor:
    """One hwmon value of a card, in the unit that its kind names."""

    kind: SensorKind
    label: str
    """The driver's label in lower case, else the sensor's index."""
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreReading:
    """One core at one moment; None where the driver does not say."""

    core: int
    """Counted from 0."""
    utilization: float | None = None
    """Per cent of its cycles spent on tasks since the reading before, 0 to 100; 0 when it was not
    in use. None before there is a second one."""
    frequency: int | None = None
    """MHz."""
    cycles: int | None = None
    """Cycles counted so far."""
    task_cycles: int | None = None
    """Those of them spent on tasks. Some start again from 0 at 2**32."""
    dram_total: int | None = None
    """Bytes of the card's memory that the core's user may take."""
    dram_used: int | None = None
    """Bytes of it taken."""
    source: CoreRange | None = None
    """Whose counters these are: the core itself, or fused cores of which it is one and for which
    the driver counts together."""


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
    """Error counters by normalised name (``axi_post_error``), in the driver's order."""
    clocks: tuple[tuple[str, int], ...] = ()
    """Clocks by the driver's name with its unit (``ne tensor (MHz)``)."""
    sensors: tuple[Sensor, ...] = ()
    cores: tuple[CoreReading, ...] = ()
    """Sorted by core; empty where the driver tells nothing of single cores."""

    def temperature(self) -> float | None:
        """The hottest sensor in °C."""
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
    """What sort of thing makes a card unhealthy: code decides on it, people read the reason."""

    DEAD = "dead"
    """The driver reports that the card does not work."""
    NODES = "nodes"
    """Device nodes are missing."""
    HANGS = "hangs"
    """A read does not return."""
    NONSENSE = "nonsense"
    """The driver answers with an error, or with nonsense."""
    HOT = "hot"
    """It is hotter than the config allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A card's health, why, and since when (seconds of `time.monotonic`)."""

    state: HealthState
    reason: str
    since: float
    cause: Cause | None = None
    """None: it is not unhealthy, or nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """A card in a Snapshot: what it is, what the kubelet may call it, how it is."""

    id: str
    """Stable over restarts and renumbering: the UUID, else serial, else PCI address, else name."""
    card: Card
    health: Health
    reading: Reading | None = None


@dataclass(frozen=True, slots=True)
class SkippedDevice:
    """Something that looked like a card and is not served, and why."""

    entry: str
    """Where it was seen, e.g. ``/sys/class/anvil/npu3``."""
    reason: str
    unread: bool = False
    """It may be a card all the same: it could not be read, and is tried again and again."""
    sample_of: str | None = None
    """The family of which it is an FPGA sample."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All the hardware of a host at one moment; what every output is computed from."""

    cards: tuple[CardState, ...] = ()
    """Sorted by number, then family."""
    skipped: tuple[SkippedDevice, ...] = ()
    complete: bool = False
    """False until every card found by the first scan has been read or has missed its deadline."""

    def without_readings(self) -> Snapshot:
        """The same but for what changes all the time."""
        return replace(self, cards=tuple(replace(state, reading=None) for state in self.cards))


def identify(
    cards: tuple[Card, ...], known: Mapping[str, frozenset[str]] = MappingProxyType({})
) -> tuple[str, ...]:
    """Gives each card its stable ID, in the order of `cards`.

    A card that is known keeps its ID. Any other is called by its UUID, else its serial number, else
    its PCI address, else its family and number. A text that two cards claim is nobody's, and one by
    which a known card is called is no newcomer's. Device IDs are made of it: it holds only
    characters that the kubelet, CDI and file names all take (a vendor's parsers see to that), and
    differs from all others by more than what could be cores: see `_stem`.

    Args:
        cards: those of one moment.
        known: the IDs of cards so far, each with what identified its card: see `remember`.
    """
    claims = [tuple(filter(None, (card.uuid, card.serial, card.pci_bus_id))) for card in cards]
    claimed = Counter(
        stem
        for card, claim in zip(cards, claims, strict=True)
        for stem in {_stem(text) for text in (*claim, _name(card))}
    )
    taken = {_stem(id_) for id_ in known}
    ids = _kept(cards, known)
    for at, (card, claim) in enumerate(zip(cards, claims, strict=True)):
        if at not in ids:
            own = (text for text in claim if claimed[_stem(text)] == 1)
            names = (_name(card), *(f"{_name(card)}-{number}" for number in range(len(taken) + 1)))
            ids[at] = next(text for text in (*own, *names) if _stem(text) not in taken)
            taken.add(_stem(ids[at]))
    return tuple(ids[at] for at in range(len(cards)))


def remember(
    known: Mapping[str, frozenset[str]], cards: tuple[Card, ...], ids: tuple[str, ...]
) -> dict[str, frozenset[str]]:
    """`known` for the next `identify`, after these cards were given these IDs.

    What identified a card before and cannot be read now goes on to do so. Beside `identities` there
    is what a card is called on the host, which tells cards apart that claim to be the same one. An
    ID that is nothing but the number is not kept: there was nothing better at that moment.
    """
    found = dict(known)
    for card, id_ in zip(cards, ids, strict=True):
        if id_ in known or id_ in (card.uuid, card.serial, card.pci_bus_id):
            now = _by_kind(card.identities) | {"name": _name(card)}
            before = _by_kind(known.get(id_, frozenset()))
            found[id_] = frozenset(f"{kind}:{text}" for kind, text in (before | now).items())
    return found


def _kept(cards: tuple[Card, ...], known: Mapping[str, frozenset[str]]) -> dict[int, str]:
    """The known IDs that cards keep, by the card's place: to each the one that fits it best.

    An ID that fits two cards equally well goes to neither.
    """
    fits: dict[tuple[int, str], list[int]] = {}
    for at, card in enumerate(cards):
        for id_, before in known.items():
            if fit := _fit(before, card):
                fits.setdefault((fit, id_), []).append(at)
    kept: dict[int, str] = {}
    used: set[str] = set()
    for (_, id_), places in sorted(fits.items(), reverse=True):
        free = [at for at in places if at not in kept]
        if free and _stem(id_) not in used:
            used.add(_stem(id_))
            if len(free) == 1:
                kept[free[0]] = id_
    return kept


def _fit(before: frozenset[str], card: Card) -> int:
    """How well a card fits what identified one before; 0 if it is another one.

    Half an answer is no other card: what is said only once counts neither way. But a card is not
    the same for its UUID alone, if it has another serial number and another place.
    """
    if not _same(before, card.identities):
        return 0
    old, new = _by_kind(before), _by_kind(card.identities)
    differ = sum(old[kind] != new[kind] for kind in old.keys() & new.keys())
    agree = len(before & card.identities)
    return 2 * agree + (old.get("name") == _name(card)) if agree >= differ else 0


def _same(one: frozenset[str], other: frozenset[str]) -> bool | None:
    """Whether both identify one card: the best kind that both have decides; None without any."""
    mine, its = _by_kind(one), _by_kind(other)
    return next((mine[kind] == its[kind] for kind in _KINDS if kind in mine and kind in its), None)


def _by_kind(identities: frozenset[str]) -> dict[str, str]:
    parts = (identity.partition(":") for identity in identities)
    return {kind: text for kind, _, text in parts}


def _name(card: Card) -> str:
    return f"{card.family}-{card.index}"


def _stem(text: str) -> str:
    """A card's ID without what could be the cores of a device: ``WBY`` of ``WBY_cores_0-1``.

    A card called ``WBY_cores_0`` beside one called ``WBY`` would have its device taken for a core
    of that one.
    """
    return _CORES.sub("", text)


_KINDS = ("uuid", "serial", "pci")
"""What identifies a card, the best first."""
_CORES = re.compile(r"(?:_cores_[0-9]+(?:-[0-9]+)?)+$")
"""As `npu_agent.core.offer.device_id` writes the cores of a device."""
