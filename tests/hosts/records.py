"""Hosts whose owners published what their cards show, made by the simulator from those values.

docs/dev/hardware.md says what each of them proves. Identities are made up: the owners left them
out. What no record says (temperatures of cores, the bridges of host B) is the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from npu_agent.people import simulator
from npu_agent.people.simulator.cards import card
from tests.inventory.helpers import management, write

_A_SWITCHES = {
    "81": ("pci0000:7a", "0000:7a:01.1", "0000:7b:00.0", "0000:7c:04.0"),
    "9d": ("pci0000:9a", "0000:9a:01.1", "0000:9b:00.0", "0000:9c:00.0"),
    "9e": ("pci0000:9a", "0000:9a:01.1", "0000:9b:00.0", "0000:9c:01.0"),
    "e3": ("pci0000:e0", "0000:e0:01.1", "0000:e1:00.0", "0000:e2:00.0"),
    "e4": ("pci0000:e0", "0000:e0:01.1", "0000:e1:00.0", "0000:e2:01.0"),
}
"""By the card's bus; the root ports are not in the record."""
_HELD = "dram_capacity: 0x0\ndram_usage: 0x0\nshared_capacity: 0x0\nshared_usage: 0x0\n"
"""`alloc_status` of a core that a container has held for 16 hours."""
_CAPACITY = (95 << 29) // 8
"""Bytes that a core of a card with 47.5 GiB has."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host at one moment.

    `cards` has the letter of each card by its number and PCI bus, such as ``{"0:81": "A"}``, and
    `warboys` the same; `slow` is the one with the low power limit; `held` are those whose cores are
    all in use, with so many GiB of a card `taken`, if the record has that; the last two are W and
    °C (ambient) by number, where it has them.
    """

    firmware: str | None = None
    cards: Mapping[str, str] = field(default_factory=dict)
    warboys: Mapping[str, str] = field(default_factory=dict)
    node_1: Sequence[str] = ()
    """The buses that are on NUMA node 1."""
    slow: int | None = None
    held: Sequence[int] = ()
    taken: float = 0.0
    watts: Sequence[int] = ()
    ambient: Sequence[int] = ()

    def make(self, root: Path) -> Path:
        specs = []
        cards = [("rngd", *found) for found in self.cards.items()]
        for family, place, letter in (*cards, *(("warboy", *at) for at in self.warboys.items())):
            number, bus = place.split(":")
            identity = card(family, ord(letter))
            spec = replace(
                card(family, int(number)),
                uuid=identity.uuid,
                serial=identity.serial,
                pci_bus_id=f"0000:{bus}:00.0",
                numa_node=int(bus in self.node_1),
            )
            if bus in _A_SWITCHES:
                spec = replace(spec, pci_path="/".join(_A_SWITCHES[bus]))
            specs.append(replace(spec, firmware_version=self.firmware or spec.firmware_version))
        simulator.make(root, specs, plain_nodes=True)
        if self.slow is not None:
            simulator.apply_fault(root, f"npu{self.slow}", "slow")
        used = round(self.taken * (1 << 30)) // 8
        figures = f"dram_capacity: {_CAPACITY:#x}\ndram_usage: {used:#x}\n" if used else _HELD
        for index in self.held:
            for entry in management(root, index, "rngd").parent.glob(f"rngd!npu{index}pe*"):
                write(entry / "alloc_status", figures)
            # Not in the record, and it would say more than that.
            write(management(root, index, "rngd") / "pe_occupancy", None)
        for file, unit, values in (
            ("power1_average", 1_000_000, self.watts),
            ("temp10_input", 1_000, self.ambient),
        ):
            for spec, value in zip(specs, values, strict=False):
                sensors = root / "sys/bus/pci/devices" / spec.pci_bus_id / "hwmon"
                write(sensors / spec.name.replace("npu", "hwmon") / file, f"{value * unit}\n")
        return root


_B_CARDS = {"0:03": "E", "1:04": "F", "2:44": "G", "3:45": "H"}
_B_FIRMWARE = "2026.3.0"
_J_BUSES = ("8b", "8c", "8d", "8e", "94", "95", "96", "97")
_J_CARDS = {f"{number}:{bus}": "IJKLMNOP"[number] for number, bus in enumerate(_J_BUSES)}
_J_FIRMWARE = "2026.3.0, 2d3f72a"

HOSTS = {
    # Its second card is slow for weeks, and nothing else says so.
    "a": Host(
        cards={"0:81": "A", "1:9d": "B", "2:9e": "C", "3:e4": "D"},
        node_1=("9d", "9e", "e4"),
        slow=1,
    ),
    # A day later its first card is in another slot: three of four have other numbers.
    "a-moved": Host(
        cards={"0:9d": "B", "1:9e": "C", "2:e3": "A", "3:e4": "D"},
        node_1=("9d", "9e", "e3", "e4"),
        slow=0,
        watts=(36, 38, 37, 38),
        ambient=(31, 30, 27, 29),
    ),
    # Pods hold three cards: opening a node is EBUSY, and the memory that they show is 0 of 0.
    "b-held": Host(cards=_B_CARDS, firmware=_B_FIRMWARE, held=(0, 1, 2), watts=(38, 38, 38, 38)),
    # Two days later the third is off the bus; the others keep their numbers.
    "b-left": Host(
        cards={place: card for place, card in _B_CARDS.items() if card != "G"},
        firmware=_B_FIRMWARE,
        watts=(40, 40, 40),
    ),
    # It came back at a reboot, and is gone again after another: now the fourth has its number.
    "b-renumbered": Host(
        cards={"0:03": "E", "1:04": "F", "2:45": "H"},
        firmware=_B_FIRMWARE,
        held=(0, 1),
        watts=(38, 38, 40),
    ),
    # The sensors that a test of the vendor finds on a card.
    "warboy": Host(warboys={"0:6d": "W"}),
    # Eight cards, none in use.
    "j": Host(cards=_J_CARDS, firmware=_J_FIRMWARE, watts=(37, 37, 37, 37, 37, 38, 38, 37)),
    # That night furiosa-llm holds four of them, as whole cards.
    "j-held": Host(cards=_J_CARDS, firmware=_J_FIRMWARE, held=(4, 5, 6, 7), taken=45.93),
    # The addresses of an RNGD and of a Warboy: of two machines, together in a test of their owner.
    "k": Host(cards={"0:27": "R"}, warboys={"0:af": "V"}),
}
