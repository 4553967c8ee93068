"""FuriosaAI's cards, read from a host's /sys and /dev: blocking I/O, on a card's own thread.

Everything here may hang for as long as the driver likes: see `npu_agent.core.vendor`. Absent files
are None; a file that is there and cannot be read raises OSError.
"""

from __future__ import annotations

import enum
import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from npu_agent.core.hardware import (
    Card,
    CoreRange,
    CoreReading,
    Limits,
    Oddity,
    Reading,
    Sensor,
    SensorKind,
)
from npu_agent.core.pool import DraSpec
from npu_agent.core.vendor import OWN_LIMITS, Entry, NotServedError, Probe, Profile, VendorSpec
from npu_agent.core.versions import DriverVersion
from npu_agent.files import SIMULATION
from npu_agent.text import natural
from npu_agent.vendors.furiosa import attributes, parse
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.spec import PROFILE, SPEC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npu_agent.vendors.furiosa.family import Family

Figure = TypeVar("Figure", int, float)

_LARGEST_FILE = 64 * 1024
"""sysfs answers at most a page; what is larger is not from a driver."""

_POWER = range(2_000_000_001)
"""What a card can take, in µW: three times what RNGD's limit allows (`power_max_mw`, 675 W)."""

_NODE = re.compile("npu([0-9]{1,4})")

_HWMON = {
    "temp": ("_input", SensorKind.TEMPERATURE),
    "power": ("_average", SensorKind.POWER),
    "in": ("_input", SensorKind.VOLTAGE),
    "curr": ("_input", SensorKind.CURRENT),
}


_LOOK_AGAIN = 30.0
"""Seconds after which each node is looked at, whether or not its directory has changed: it may be
another kind of file now."""


class _Look(NamedTuple):
    changed: int
    at: float
    nodes: frozenset[str]


class Furiosa:
    """FuriosaAI's cards on one host: a `npu_agent.core.vendor.Vendor`, which explains the verbs."""

    spec: ClassVar[VendorSpec] = SPEC
    dra: ClassVar[DraSpec] = attributes.DRA
    profile: ClassVar[Profile] = PROFILE

    def __init__(
        self, root: Path, families: Mapping[str, Family] = FAMILIES, *, simulated: bool = False
    ) -> None:
        """`root` is where the host's ``/`` is seen: ``/`` itself, or a mount in a container."""
        self._simulated = simulated
        self.place = str(root / "sys/class")
        self._families = families
        self._sys = str(root / "sys")
        self._dev = str(root / "dev")
        self._simulation = str(root / SIMULATION)
        self._looks: dict[tuple[str, int], _Look] = {}
        """The nodes of each entry, as they were found last."""

    def scan(self) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        for family in self._families.values():
            with suppress(FileNotFoundError):
                entries += self._entries(family)
        return tuple(sorted(entries, key=lambda entry: (entry.index, entry.family, entry.path)))

    def _entries(self, family: Family) -> Iterator[Entry]:
        directory = f"{self.place}/{family.class_dir}"
        for name in os.listdir(directory):  # noqa: PTH208 (as in _is_node)
            path = f"{directory}/{name}"
            if (match := family.entry.fullmatch(name)) and (inode := _inode(path)) is not None:
                yield Entry(
                    family=family.name,
                    index=int(match[1]),
                    path=path,
                    inode=inode,
                    counters_wrap=family.counts_in_use_only,
                )

    def identify(self, entry: Entry) -> Card:
        family = self._families[entry.family]
        directory = entry.path
        platform = parse.text(_read(f"{directory}/platform_type"))
        if platform == "VITIS":
            raise NotServedError(
                "an FPGA sample (platform_type VITIS): these are not handed out", sample=True
            )
        if platform not in (None, "FuriosaAI"):
            raise NotServedError(f"platform_type is {platform!r} and not FuriosaAI")
        device_type = parse.text(_read(f"{directory}/device_type"))
        if device_type is None:
            raise NotServedError(
                "device_type is absent, empty or not text: the card cannot be identified"
            )
        nodes = self._nodes_now(entry)
        oddities: list[tuple[Oddity, str]] = []
        product = family.product(device_type, parse.text(_optional(f"{directory}/soc_rev")))
        if product is None:
            product = self._product_of_kin(entry, device_type, nodes)
            oddities.append(("ProductUnknown", device_type))
        if (
            family.secondary_file
            and parse.text(_optional(f"{directory}/{family.secondary_file}")) == "1"
        ):
            raise NotServedError(f"{family.secondary_file} says 1: it is a part of another card")
        address = parse.pci_address(_optional(f"{directory}/busname"))
        if address and _entries(f"{self._pci(address)}/physfn"):
            raise NotServedError(f"{address} is a virtual function (SR-IOV), and no whole card")
        driver = parse.text(_optional(f"{directory}/version"))
        firmware = parse.text(_optional(f"{directory}/fw_version"))
        oddities += (
            ("VersionUnreadable", text)
            for text in (driver, firmware)
            if text and DriverVersion.of(text).semver is None
        )
        return family.card(
            entry.index,
            product=product,
            uuid=parse.identifier(_optional(f"{directory}/device_uuid")),
            serial=parse.identifier(_optional(f"{directory}/device_sn")),
            pci_bus_id=address,
            dev=parse.device_number(_optional(f"{directory}/dev")),
            driver_version=driver,
            firmware_version=firmware,
            numa_node=parse.numa_node(_optional(f"{self._pci(address)}/numa_node"))
            if address
            else None,
            switches=self._switches(address) if address else (),
            lanes=self._link(address, "width", parse.integer) if address else None,
            link_speed=self._link(address, "speed", parse.link_speed) if address else None,
            nodes=nodes,
            simulated=self._simulated,
            oddities=tuple(oddities),
        )

    def _product_of_kin(self, entry: Entry, device_type: str, nodes: frozenset[str]) -> str:
        """The name of a product that is not known yet: ``RNGD+`` is ``rngd-plus``.

        Raises:
            NotServedError: it is nothing like the family, or has other nodes.
        """
        family = self._families[entry.family]
        match = family.kin.fullmatch(device_type) if family.kin else None
        if match is None:
            raise NotServedError(f"device_type {device_type!r} is not known for {family.title}")
        names = _entries(f"{self._dev}/{family.dev_dir}")
        cores = f"npu{entry.index}pe"
        own = {family.dev_dir + name for name in names if name.startswith(cores)} | nodes
        wanted = frozenset(family.access(entry.index).required_nodes)
        if odd := wanted.difference(nodes) or own.difference(family.nodes(entry.index)):
            first = min(odd, key=natural)
            has = "lacks" if first in wanted else "has"
            raise NotServedError(
                f"device_type {device_type!r} is not known, and has not the nodes of "
                f"{family.title}: /dev {has} {first}"
            )
        words = re.findall("[a-z0-9]+", match[1].lower().replace("+", "plus"))
        return f"{family.name}-{''.join(words)}"

    def probe(self, entry: Entry) -> Probe:
        file = self._families[entry.family].liveness_file
        raw = _read(f"{entry.path}/{file}")
        nodes = self._nodes_now(entry)
        try:
            alive = parse.liveness(raw)
        except ValueError as error:
            raise ValueError(f"{file} says {error}") from None
        return Probe(alive, f"{file} says 0" if alive is False else "", nodes)

    def read(self, entry: Entry, card: Card) -> Reading:
        family = self._families[entry.family]
        directory = entry.path

        try:
            alive = parse.liveness(_optional(f"{directory}/{family.liveness_file}"))
        except ValueError:
            alive = None
        uptime = parse.integer(_optional(f"{directory}/heartbeat"))
        clocks = _optional(f"{directory}/ne_clk_freq_info") or _optional(f"{directory}/npu_clocks")
        cores = self.read_cores(entry, family.frequencies(clocks))
        on_bus = self._bus_errors(card.pci_bus_id) if card.pci_bus_id else ()
        return Reading(
            at=time.monotonic(),
            alive=alive,
            uptime=uptime if uptime is not None and uptime >= 0 else None,
            errors=(*parse.errors(_optional(f"{directory}/atr_error")), *on_bus),
            sensors=self._sensors(card.pci_bus_id, family) if card.pci_bus_id else (),
            cores=cores,
            **(_limits(directory) if family.limits else {}),
        )

    def read_cores(
        self, entry: Entry, frequencies: tuple[int | None, ...] = ()
    ) -> tuple[CoreReading, ...]:
        family = self._families[entry.family]
        occupied: tuple[int | None, ...] = ()
        if family.occupancy_file:
            raw = _optional(f"{entry.path}/{family.occupancy_file}")
            occupied = parse.per_core(raw, family.core_count)
        unknown = (None,) * family.core_count
        cores = map(
            partial(_core, entry, family),
            range(family.core_count),
            occupied or unknown,
            frequencies or unknown,
        )
        return _within(tuple(filter(None, cores)), family.memory_gib << 30)

    def pci_addresses(self) -> frozenset[str]:
        addresses = (parse.pci_address(_optional(f"{entry.path}/busname")) for entry in self.scan())
        return frozenset(filter(None, addresses))

    def given(self) -> tuple[Card, ...]:
        return tuple(
            family.card(index, product=family.name, nodes=nodes)
            for family in self._families.values()
            for index, nodes in self._nodes_of_all(family)
        )

    def _nodes_of_all(self, family: Family) -> Iterator[tuple[int, frozenset[str]]]:
        names = _entries(f"{self._dev}/{family.dev_dir}")
        paths = frozenset(family.dev_dir + name for name in names)
        numbers = {int(match[1]) for name in names if (match := _NODE.match(name))}
        for index in sorted(numbers):
            if nodes := paths.intersection(family.nodes(index)):
                yield index, nodes

    def _pci(self, address: str) -> str:
        return f"{self._sys}/bus/pci/devices/{address}"

    def _switches(self, address: str) -> tuple[str, ...]:
        """The bridges above the card: sysfs has a link to its directory, which is below theirs."""
        try:
            parts = os.readlink(self._pci(address)).split("/")  # noqa: PTH115 (as in _is_node)
        except OSError as error:
            _unless_limited(error)
            return ()
        roots = [at for at, part in enumerate(parts) if part.startswith("pci")]
        return tuple(parts[roots[-1] : -1]) if roots else ()

    def _link(
        self, address: str, what: str, parsed: Callable[[bytes | None], Figure | None]
    ) -> tuple[Figure, Figure] | None:
        """See `Card.lanes` and `Card.link_speed`; the other end is the bridge above the card."""
        own = self._pci(address)
        files = (f"current_link_{what}", f"max_link_{what}", f"../max_link_{what}")
        now, *most = (parsed(_optional(f"{own}/{file}")) for file in files)
        readable = [figure for figure in most if figure]
        return (now, min(readable)) if now and readable else None

    def _bus_errors(self, address: str) -> Iterator[tuple[str, int]]:
        """What the kernel has counted of the card on the PCI bus, without what was corrected."""
        for kind in ("fatal", "nonfatal"):
            count = parse.aer_total(_optional(f"{self._pci(address)}/aer_dev_{kind}"))
            if count is not None:
                yield f"aer_{kind}", count

    def _nodes_now(self, entry: Entry) -> frozenset[str]:
        """As `_nodes`, which is asked if the directory has changed, and after `_LOOK_AGAIN`."""
        now = time.monotonic()
        changed = _changed(f"{self._dev}/{self._families[entry.family].dev_dir}")
        look = self._looks.get(entry.key)
        if look is None or look.changed != changed or now - look.at > _LOOK_AGAIN:
            look = _Look(changed, now, self._nodes(entry))
            self._looks[entry.key] = look
        return look.nodes

    def _nodes(self, entry: Entry) -> frozenset[str]:
        """Returns the card's nodes that exist. Never opens one: opening occupies the core."""
        return frozenset(
            node
            for node in self._families[entry.family].nodes(entry.index)
            if self._is_node(f"{self._dev}/{node}")
        )

    def _is_node(self, path: str) -> bool:
        """Whether it is a character device, or a file that stands for one in a simulated tree."""
        mode = _mode(path)
        return stat.S_ISCHR(mode) or (stat.S_ISREG(mode) and stat.S_ISDIR(_mode(self._simulation)))

    def _sensors(self, address: str, family: Family) -> tuple[Sensor, ...]:
        sensors: list[Sensor] = []
        directory = f"{self._pci(address)}/hwmon"
        for name in sorted(_entries(directory)):
            for path, kind, label in _sensor_files(f"{directory}/{name}"):
                value = parse.integer(_optional(path))
                if value is not None and (kind is not SensorKind.POWER or value in _POWER):
                    sensors.append(Sensor(kind, family.sensor_label(label), value))
        return tuple(sensors)


def _limits(directory: str) -> dict[str, Any]:
    """What holds a card up, as fields of `Reading`."""

    def number(file: str, per_unit: int, least: int, most: int) -> float | None:
        value = parse.within(_optional(f"{directory}/{file}"), least * per_unit, most * per_unit)
        return None if value is None else value / per_unit

    clock = number("npu_freq_limit_hz", 1_000_000, 1, 100_000)
    return {
        "error_text": parse.text(_optional(f"{directory}/hw_error")),
        "throttle": parse.throttle(_optional(f"{directory}/throttle_reason")),
        "limits": Limits(
            power=number("power_limit_mw", 1_000, 1, 10_000),
            default_power=number("power_limit_default_mw", 1_000, 1, 10_000),
            clock=None if clock is None else round(clock),
            slowdown=number("npu_slowdown_temperature_mc", 1_000, 30, 150),
        ),
    }


def _within(cores: tuple[CoreReading, ...], most: int) -> tuple[CoreReading, ...]:
    """The cores, with no more memory together than `most` bytes: what the card has.

    Where they would have more, each has the figures of the whole card.
    """
    totals = [core.dram_total for core in cores if core.dram_total is not None]
    if sum(totals) <= most:
        return cores
    if max(totals) > most:
        return tuple(replace(core, dram_total=None, dram_used=None) for core in cores)
    return tuple(
        replace(
            core,
            dram_total=core.dram_total // len(totals),
            dram_used=(core.dram_used or 0) // len(totals),
        )
        if core.dram_total is not None
        else core
        for core in cores
    )


def _sensor_files(directory: str) -> Iterator[tuple[str, SensorKind, str]]:
    for name in sorted(_entries(directory), key=natural):
        for prefix, (suffix, kind) in _HWMON.items():
            number = name.removeprefix(prefix).removesuffix(suffix)
            if name == prefix + number + suffix and number.isdecimal():
                label = parse.text(_optional(f"{directory}/{prefix}{number}_label"))
                yield f"{directory}/{name}", kind, label or number


def _inode(path: str) -> int | None:
    """The inode of a card's entry; None if it is gone."""
    try:
        return os.stat(path).st_ino  # noqa: PTH116 (as in _is_node)
    except FileNotFoundError:
        return None  # unbound since the directory was listed
    except OSError as error:
        _unless_limited(error)
        return 0  # `identify` says why; the others are still found


def _changed(directory: str) -> int:
    """When a name was added or removed there, in ns; 0 if it cannot be reached."""
    try:
        return os.stat(directory).st_mtime_ns  # noqa: PTH116 (as in _is_node)
    except OSError as error:
        _unless_limited(error)
    return 0


def _mode(path: str) -> int:
    """The `st_mode` of what is there; 0 if nothing is that can be reached."""
    try:
        return os.stat(path).st_mode  # noqa: PTH116 (a Path costs four times as much)
    except OSError as error:
        _unless_limited(error)
    return 0


_Figures = tuple[int, int]


def _core(
    entry: Entry, family: Family, core: int, occupied: int | None, frequency: int | None
) -> CoreReading | None:
    """Reads the files of a core.

    A container that holds fused cores has its figures in the entry of the fused cores, while those
    of the single ones tell that they are free. So a core's figures are those of the narrowest entry
    that has some.
    """
    covering = tuple(cores for cores in family.core_ranges if cores.first <= core <= cores.last)
    holder: CoreRange | None = None
    memory: _Figures | _NoReading = _NoReading.NOTHING
    if family.memory_file and family.memory and occupied != 0:
        holder, memory = _first(entry, family, covering, family.memory_file, family.memory)
        if holder:
            covering = (holder, *(cores for cores in covering if cores != holder))
    source, counters = _first(entry, family, covering, family.counters_file, family.counters)
    availability = counters if memory is _NoReading.NOTHING else memory
    free = occupied == 0 or (occupied != 1 and availability is _NoReading.FREE)
    cycles, task_cycles = (None, None) if isinstance(counters, _NoReading) else counters
    total = used = None
    if holder and not isinstance(memory, _NoReading):
        # What fused cores have together is split into equal parts, so that cores can be summed.
        total = memory[0] // len(holder)
        used = memory[1] // len(holder)
    if frequency is None and total is None and source is None and not free:
        return None
    return CoreReading(
        core=core,
        utilization=0.0 if free else None,
        frequency=frequency,
        cycles=cycles,
        task_cycles=task_cycles,
        dram_total=total,
        dram_used=used,
        source=source,
    )


def _first(
    entry: Entry,
    family: Family,
    covering: tuple[CoreRange, ...],
    file: str,
    understand: Callable[[bytes], _Figures | None],
) -> tuple[CoreRange | None, _Figures | _NoReading]:
    """The first of the entries `covering` a core whose file has figures, and these."""
    parent = os.path.dirname(entry.path)  # noqa: PTH120 (as in _is_node)
    prefix = f"{parent}/{family.core_entry.format(n=entry.index)}"
    without = _NoReading.NOTHING
    for cores in covering:
        figures = _figures(f"{prefix}{cores}/{file}", understand)
        if not isinstance(figures, _NoReading):
            return cores, figures
        if without is not _NoReading.NONSENSE and figures is not _NoReading.NOTHING:
            without = figures
    return None, without


class _NoReading(enum.Enum):
    NOTHING = "there is none"
    FREE = "they refuse to be read, or are empty: the core is not in use"
    NONSENSE = "one cannot be read or understood"


def _figures(path: str, understand: Callable[[bytes], _Figures | None]) -> _Figures | _NoReading:
    try:
        raw = _read(path)
    except PermissionError:
        return _NoReading.FREE
    except OSError as error:
        _unless_limited(error)
        return _NoReading.NONSENSE
    if raw is None:
        return _NoReading.NOTHING
    if not raw or raw.isspace():
        return _NoReading.FREE
    return understand(raw) or _NoReading.NONSENSE


def _read(path: str) -> bytes | None:
    """The file's content, None if there is no such file; raises OSError when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.read(descriptor, _LARGEST_FILE)
    except OSError as error:
        error.filename = path  # unlike open, read does not say of what
        raise
    finally:
        os.close(descriptor)


def _optional(path: str) -> bytes | None:
    """Reads like `_read`; a file that cannot be read is absent."""
    try:
        return _read(path)
    except OSError as error:
        _unless_limited(error)
        return None


def _unless_limited(error: OSError) -> None:
    """Raises an error for which the card is not to blame, so that nothing is taken for absent."""
    if error.errno in OWN_LIMITS:
        raise error


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 (names are wanted, not paths)
    except OSError as error:
        _unless_limited(error)
        return []
