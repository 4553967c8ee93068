"""What simulated cards are: two families, a card's identity, and the text that asks for cards."""

import uuid
from dataclasses import dataclass, replace

from npu_agent.text import closest

MAX_CARDS = 1024


@dataclass(frozen=True)
class Family:
    """What all cards of one family have in common.

    Attributes:
        name: as `--cards` spells it.
        title: for people, such as `FuriosaAI Warboy`.
        device_type: content of the file `device_type`.
        pci_device: PCI device id below vendor 1ed2.
        cores: number of processing elements (PE).
        fused: PE ranges that have a node of their own beside the single ones.
        clock_mhz: what the cycle counters count.
        core_dram: bytes of DRAM per core that the driver reports; 0 if it does not.
        idle_watts: power at no load.
        busy_watts: power with every core at full load.
    """

    name: str
    title: str
    device_type: str
    pci_device: int
    cores: int
    fused: tuple[str, ...]
    clock_mhz: int
    core_dram: int
    idle_watts: float
    busy_watts: float


# The counters of a Warboy belong to the control processor of a PE: the "ne operation" clock. At
# 1 GHz a 32-bit counter wraps after 4.3 s of full load, so a reader has to look more often.
FAMILIES = {
    family.name: family
    for family in (
        Family("warboy", "FuriosaAI Warboy", "Warboy", 0, 2, ("0-1",), 1000, 0, 1.37, 55.0),
        Family(
            name="rngd",
            title="FuriosaAI RNGD",
            device_type="RNGD",
            pci_device=1,
            cores=8,
            fused=("0-1", "2-3", "4-5", "6-7", "0-3", "4-7"),
            clock_mhz=1000,
            core_dram=6 << 30,
            idle_watts=53.0,
            busy_watts=180.0,
        ),
    )
}

# Only these differ by family and may differ by card as well: soc_rev, driver, firmware, serial.
_RELEASES = {
    "warboy": ("B0", "1.9.2, 3def9c2", "1.6.0, c1bebfd", "WBYB0236FH"),
    "rngd": ("B0", "2025.4.0~dev0, 7e25130", "2025.4.0, 9a1f0c3", "RNGD0125FH"),
}
_DEV_MAJOR = {"warboy": 509, "rngd": 508}
_IDENTITIES = uuid.UUID("1ed20000-1200-4e50-8000-6e70752d6167")
_CARDS_PER_DOMAIN = 120  # 30 pairs a root complex, 4 buses each: more would run out of buses


@dataclass(frozen=True)
class CardSpec:
    """One simulated card: who it is and where it sits. `card()` makes one with all filled in.

    Any value may be overridden with `dataclasses.replace`; an empty text gives an empty file.

    Attributes:
        family: a key of `FAMILIES`.
        index: its number on the host, over all families: 0 is `npu0`.
        uuid: upper-case UUID.
        serial: serial number.
        pci_bus_id: PCI address, such as `0000:01:00.0`.
        pci_path: the bridges above it below /sys/devices, root complex first, slash-separated.
        numa_node: -1 is none.
        dev: character device `major:minor` of the management node.
        soc_rev: revision, such as `B0`.
        driver_version: as in the file `version`: version, comma, commit.
        firmware_version: as in the file `fw_version`.
    """

    family: str
    index: int
    uuid: str
    serial: str
    pci_bus_id: str
    pci_path: str
    numa_node: int
    dev: str
    soc_rev: str
    driver_version: str
    firmware_version: str

    @property
    def name(self) -> str:
        """`npu0` and so on."""
        return f"npu{self.index}"

    @property
    def traits(self) -> Family:
        """What it shares with its family."""
        return FAMILIES[self.family]


def card(family: str, index: int) -> CardSpec:
    """The card with this number; the same arguments give the same card, down to its UUID.

    Cards sit in pairs behind one PCIe switch (each below a downstream port of its own), and the
    pairs alternate between two NUMA nodes: npu0 and npu1 on node 0, npu2 and npu3 on node 1, ...

    Raises:
        ValueError: there is no such family, or the number is out of range.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}{_suggest(family)}")
    if not 0 <= index < MAX_CARDS:
        raise ValueError(f"card number {index} is out of range: 0 to {MAX_CARDS - 1}")
    domain, place = divmod(index, _CARDS_PER_DOMAIN)
    pair, slot = divmod(place, 2)
    position, numa_node = divmod(pair, 2)
    root = numa_node * 0x80
    bus = root + position * 4 + 1  # two cards, then the two sides of their switch
    revision, driver, firmware, serial = _RELEASES[family]
    identity = uuid.uuid5(_IDENTITIES, f"{family}/{index}")
    return CardSpec(
        family=family,
        index=index,
        uuid=str(identity).upper(),
        serial=serial + identity.hex[:7].upper(),
        pci_bus_id=f"{domain:04x}:{bus + slot:02x}:00.0",
        pci_path="/".join(
            (
                f"pci{domain:04x}:{root:02x}",
                f"{domain:04x}:{root:02x}:{position + 1:02x}.0",  # root port
                f"{domain:04x}:{bus + 2:02x}:00.0",  # upstream port: the switch both share
                f"{domain:04x}:{bus + 3:02x}:{slot:02x}.0",  # downstream port
            )
        ),
        numa_node=numa_node,
        dev=f"{_DEV_MAJOR[family]}:{index}",
        soc_rev=revision,
        driver_version=driver,
        firmware_version=firmware,
    )


def swapped(spec: CardSpec) -> CardSpec:
    """Another card of the same family in the same slot: a new UUID and serial number."""
    identity = uuid.uuid5(_IDENTITIES, f"after {spec.uuid or spec.serial}")
    serial = _RELEASES[spec.family][3] + identity.hex[:7].upper()
    return replace(spec, uuid=str(identity).upper(), serial=serial)


def parse_cards(text: str) -> tuple[CardSpec, ...]:
    """Cards from text such as `warboy=2,rngd=1`, numbered in the order given; `warboy` is one.

    A count of 0 is allowed: a host without cards is a host, too.

    Raises:
        ValueError: says which part is wrong and what would be right.
    """
    families: list[str] = []
    for part in text.split(","):
        name, equals, count = (piece.strip() for piece in part.partition("="))
        if name not in FAMILIES:
            what = f"unknown family {name!r}" if name else f"a family is missing in {part!r}"
            raise ValueError(f"--cards {text!r}: {what}{_suggest(name)}")
        if not equals:
            count = "1"
        if not (count.isascii() and count.isdigit()):
            raise ValueError(
                f"--cards {text!r}: {count!r} is not a number of cards; right is e.g. {name}=2"
            )
        # A text of 5,000 digits is refused by int() itself, with words that do not help.
        if len(count) > 4 or len(families) + int(count) > MAX_CARDS:
            raise ValueError(f"--cards {text!r}: more than {MAX_CARDS} cards in all")
        families += [name] * int(count)
    return tuple(card(family, index) for index, family in enumerate(families))


def _suggest(name: str) -> str:
    close = closest(name, FAMILIES)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"{hint} (there are: {', '.join(FAMILIES)}; right is e.g. warboy=2,rngd=1)"
