"""Names of this vendor's cards in DRA: driver, attributes and capacities.

The names are those of the vendor's own DRA driver, so that its users' selectors go on to work;
`type`, `cores`, `firmwareVersion`, `product`, `serial` and `pcieSwitch` are additions.
"""

from __future__ import annotations

import re

from npu_agent.core.hardware import Card, CoreRange
from npu_agent.core.pool import Description, DraSpec, Value, Version
from npu_agent.core.versions import DriverVersion
from npu_agent.vendors.furiosa.families import FAMILIES

LONGEST = 64
"""Bytes of an attribute's value: the API server's limit. What is longer is left out, as half of an
identity would be another card's."""

_PCI_BUS_ID = "resource.kubernetes.io/pciBusID"
_PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
_NUMA_NODE = "resource.kubernetes.io/numaNode"
"""The name that drivers of other devices use as well (KEP-6072), for claims that match both."""
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def describe(card: Card, cores: CoreRange) -> Description:
    """Returns the published attributes of a device with these cores, without unknown ones."""
    described: Description | None = card.kept.get(("description", cores))
    if described is None:
        described = card.kept["description", cores] = _describe(card, cores)
    return described


def _describe(card: Card, cores: CoreRange) -> Description:
    root = card.switches[0] if card.switches else None
    values: dict[str, Value | None] = {
        "index": card.index,
        "uuid": card.uuid,
        "arch": card.family,
        "type": "card" if cores == card.all_cores else "cores",
        "cores": len(cores),
        "product": card.product or None,
        "serial": card.serial,
        "driverVersion": version(card.driver_version),
        "firmwareVersion": version(card.firmware_version),
        "numaNode": card.numa_node,
        "pcieSwitch": card.switch,
        "simulated": card.simulated or None,
        _NUMA_NODE: card.numa_node,
        _PCI_BUS_ID: card.pci_bus_id,
        _PCIE_ROOT: root if root and _ROOT.fullmatch(root) else None,
    }
    readable = {name: value for name, value in values.items() if value is not None}
    memory = FAMILIES[card.family].memory_gib * len(cores) // card.core_count
    size = {"memory": f"{memory}Gi"}
    return Description(
        attributes={
            name: value
            for name, value in readable.items()
            if not isinstance(value, str) or len(value.encode()) <= LONGEST
        },
        capacity={"core": str(len(cores)), **size},
        counters={"cores": str(len(cores)), **size},
    )


def version(text: str | None) -> Version | None:
    """A driver's ``2025.4.0~dev0, 7e25130`` as the semver ``2025.4.0-dev0+7e25130``.

    None for a text that is not a semver: the API server refuses it.
    """
    semver = DriverVersion.of(text or "").semver
    return Version(semver) if semver else None


def blank(family: str, index: int) -> Card:
    """A card as every host has it; the product is of the host, as a Warboy's has its revision."""
    of = FAMILIES[family]
    return of.card(index, product="", nodes=frozenset(of.nodes(index)))


DRA = DraSpec(
    driver="npu.furiosa.ai",
    claim_kind="furiosa.ai/claim",
    describe=describe,
    blank=blank,
    of_host=(
        *("uuid", "product", "serial", "driverVersion", "firmwareVersion", "numaNode"),
        *("pcieSwitch", _NUMA_NODE, _PCI_BUS_ID, _PCIE_ROOT),
    ),
    # The vendor's driver offers RNGD only, so claims that are written for it name no family.
    first="rngd",
)
