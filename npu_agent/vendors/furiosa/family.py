"""A family of cards: all that the agent needs to find, watch and offer its cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npu_agent.core.hardware import Access, Card
from npu_agent.core.vendor import MetricSource

VENDOR = "furiosa"
CDI_KIND = "furiosa.ai/npu"
ENVIRONMENT = (("NPU_DEVNAME", "npu{n}pe{cores}"), ("FURIOSA_DEVICES", "npu:{n}:{cores}"))

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable

    from npu_agent.core.hardware import CoreRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproven:
    """A file whose format is not public; a table in docs/dev/hardware.md is made from these."""

    file: str
    known: str
    """What is public about it: for people, as Markdown."""
    guessed: str
    """How the agent reads it; Markdown."""
    quantities: tuple[MetricSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The vendor's conventions for one family. Node names are templates; ``{n}`` is the number."""

    name: str
    """As in config files: ``warboy``."""
    title: str
    """For people: ``FuriosaAI Warboy``."""
    core_count: int
    memory_gib: int
    """GiB of memory that a card has for its cores, an equal part for each."""
    class_dir: str
    """Below /sys/class: the directory with one entry a card."""
    entry: re.Pattern[str]
    """Matches the whole name of such an entry; group 1 is the card's number."""
    product: Callable[[str, str | None], str | None]
    """``(device_type, soc_rev)`` -> product name, or None if that is not a card of this family."""
    kin: re.Pattern[str] | None = None
    """Matches the whole `device_type` of a product that is not known yet; group 1 is its own part
    of it. With the nodes of this family it is served as a card of it."""
    liveness_file: str
    """In the entry's directory; ``1`` means alive."""
    dev_dir: str
    """Below /dev, with a trailing slash, or empty: where the nodes are."""
    shared_nodes: tuple[str, ...]
    """Nodes that every holder of a core needs."""
    whole_environment: tuple[tuple[str, str], ...] = ()
    """As `Access.whole_environment`."""
    optional_nodes: tuple[str, ...] = ()
    """Nodes that every holder of a core gets where the driver has them."""
    whole_nodes: tuple[str, ...]
    """Nodes that only the holder of the whole card gets."""
    core_ranges: tuple[CoreRange, ...]
    """The PE nodes there are: single cores and fused ones, the narrow ones first."""
    core_entry: str
    """Next to the card's entry: that of a core, or of fused ones. The cores follow this name."""
    counters_file: str
    """In a core's entry: what it has counted."""
    counters: Callable[[bytes], tuple[int, int] | None]
    """That file's content -> ``(cycles, task cycles)``."""
    counts_in_use_only: bool
    """Whether only cores in use have counters, of 32 bits that start again from 0 at 2**32;
    else every core has them, of 64 bits."""
    frequencies: Callable[[bytes | None], tuple[int | None, ...]]
    """The file of clocks -> MHz of each core; empty where it tells none."""
    sensor_label: Callable[[str], str] = str
    """A sensor's label as the driver writes it -> as metrics have it."""
    memory_file: str | None = None
    """In a core's entry: the memory of its user; empty while the core is free."""
    memory: Callable[[bytes], tuple[int, int] | None] | None = None
    """That file's content -> ``(bytes that may be taken, bytes taken)``."""
    limits: bool = False
    """Whether newer drivers have files for limits, reasons to throttle, and errors as a text."""
    secondary_file: str | None = None
    """In the card's entry: ``1`` where it is a part of another card."""
    occupancy_file: str | None = None
    """In the card's entry: a line a core, ``1`` in use and ``0`` free."""
    unproven: tuple[Unproven, ...] = ()

    def access(self, index: int) -> Access:
        def paths(nodes: Iterable[str]) -> tuple[str, ...]:
            return tuple(self.dev_dir + node.format(n=index) for node in nodes)

        core_nodes = paths(f"npu{{n}}pe{cores}" for cores in self.core_ranges)
        return Access(
            shared_nodes=paths(self.shared_nodes),
            whole_nodes=paths(self.whole_nodes),
            optional_nodes=paths(self.optional_nodes),
            core_nodes=tuple(zip(self.core_ranges, core_nodes, strict=True)),
            environment=_numbered(ENVIRONMENT, index),
            whole_environment=_numbered(self.whole_environment, index),
            cdi_kind=CDI_KIND,
        )

    def nodes(self, index: int) -> tuple[str, ...]:
        """Paths below /dev of every node that card `index` may have."""
        return self.access(index).nodes()

    def card(self, index: int, *, product: str, **facts: Any) -> Card:
        """Card `index` of this family; `facts` are further fields of `Card`."""
        return Card(
            vendor=VENDOR,
            family=self.name,
            title=self.title,
            core_count=self.core_count,
            access=self.access(index),
            index=index,
            product=product,
            memory=self.memory_gib << 30,
            **facts,
        )

    @property
    def files(self) -> tuple[str, ...]:
        """The files of a card and its cores that differ by family."""
        optional = (self.memory_file, self.secondary_file, self.occupancy_file)
        return (self.liveness_file, self.counters_file, *filter(None, optional))

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of cores that a device can have: those with nodes, and the whole card."""
        return tuple(sorted({len(cores) for cores in self.core_ranges} | {self.core_count}))


def _numbered(forms: Iterable[tuple[str, str]], index: int) -> tuple[tuple[str, str], ...]:
    return tuple((name, form.replace("{n}", str(index))) for name, form in forms)
