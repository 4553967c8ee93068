"""Simulated cards: a card's identity, and the text that requests cards."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from npu_agent.people.simulator.families import FAMILIES, IDENTITIES, CardFamily
from npu_agent.text import closest

MAX_CARDS = 1024


def default_cards() -> str:
    return f"{next(iter(FAMILIES))}=2"


_CARDS_PER_DOMAIN = 120  # 30 pairs a root complex, 4 buses each: more would run out of buses


@dataclass(frozen=True)
class CardSpec:
    """The identity and place of a simulated card. `card()` makes a complete one.

    An empty text gives an empty file. `index` counts over all families; `pci_path` has the bridges
    below /sys/devices, root complex first; `numa_node` -1 is none; `dev` is `major:minor` of the
    management node.
    """

    family: str
    index: int
    uuid: str
    serial: str
    pci_bus_id: str
    pci_path: str
    numa_node: int
    dev: str
    revision: str
    driver_version: str
    firmware_version: str

    @property
    def name(self) -> str:
        return f"npu{self.index}"

    @property
    def traits(self) -> CardFamily:
        return FAMILIES[self.family]


def with_driver(specs: Sequence[CardSpec], release: str) -> tuple[CardSpec, ...]:
    """The cards with an older release of their driver, where their family has it.

    Raises:
        ValueError: none of their families has it.
    """
    if not any(release in spec.traits.older for spec in specs):
        releases = {older: name for name, family in FAMILIES.items() for older in family.older}
        listed = ", ".join(f"{older} of {name}" for older, name in releases.items())
        raise ValueError(f"--driver {release!r}: not of these cards (there are: {listed})")
    cards = []
    for spec in specs:
        newest = spec.driver_version, spec.firmware_version
        driver, firmware = spec.traits.older.get(release, newest)
        cards.append(replace(spec, driver_version=driver, firmware_version=firmware))
    return tuple(cards)


def card(family: str, index: int, host: str = "") -> CardSpec:
    """The card with this number; the same arguments give the same card, down to its UUID.

    The cards of two hosts that are named have different UUIDs.

    Cards sit in pairs behind one PCIe switch (each below a downstream port of its own), and the
    pairs alternate between two NUMA nodes: npu0 and npu1 on node 0, npu2 and npu3 on node 1, ...
    """
    domain, place = divmod(index, _CARDS_PER_DOMAIN)
    pair, slot = divmod(place, 2)
    position, numa_node = divmod(pair, 2)
    root = numa_node * 0x80
    bus = root + position * 4 + 1  # two cards, then the two sides of their switch
    traits = FAMILIES[family]
    identity = uuid.uuid5(IDENTITIES, f"{host}{family}/{index}")
    return CardSpec(
        family=family,
        index=index,
        uuid=str(identity).upper(),
        serial=traits.serial + identity.hex[:7].upper(),
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
        dev=f"{traits.dev_major}:{index}",
        revision=traits.revision,
        driver_version=traits.driver_version,
        firmware_version=traits.firmware_version,
    )


def swapped(spec: CardSpec) -> CardSpec:
    """Another card of the same family in the same slot: a new UUID and serial number."""
    identity = uuid.uuid5(IDENTITIES, f"after {spec.uuid}{spec.serial}")
    serial = spec.traits.serial + identity.hex[:7].upper()
    return replace(spec, uuid=str(identity).upper(), serial=serial)


def parse_cards(
    text: str, *, option: str = "--cards", most: int = MAX_CARDS, host: str = ""
) -> tuple[CardSpec, ...]:
    """Cards from text such as `a=2,b=1`, numbered in the order given; `a` alone is one.

    A count of 0 is allowed: a host without cards is a host, too.

    Args:
        text: what was asked for.
        option: by which, for messages.
        most: how many cards there may be.
        host: see `card`.

    Raises:
        ValueError: says which part is wrong and what would be right.
    """
    place = f"{option} {text!r}"
    wanted: list[str] = []
    for part in text.split(","):
        name, equals, count = (piece.strip() for piece in part.partition("="))
        if name not in FAMILIES:
            raise ValueError(f"{place}: unknown family {name!r}{suggest(name, FAMILIES)}")
        count = count if equals else "1"
        if not re.fullmatch("[0-9]{1,4}", count):
            raise ValueError(f"{place}: {count!r} is not a number of cards; right is e.g. {name}=2")
        wanted += [name] * int(count)
    if len(wanted) > most:
        raise ValueError(f"{place}: more than {most} cards in all")
    return tuple(card(family, index, host) for index, family in enumerate(wanted))


def suggest(name: str, names: Collection[str]) -> str:
    """Suggests the likely name, and lists all: the end of an error."""
    close = closest(name, names)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"{hint} (there are: {', '.join(names) or 'none'})"
