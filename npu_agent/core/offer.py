"""Computes the devices of a resource from a Snapshot: how cards are cut. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from npu_agent.core.hardware import Card, CardState, CoreRange, HealthState, Snapshot

_PART = "_cores_"
"""Before the cores in a part's ID, as the vendor's plugins write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A named set of devices, and their width in cores."""

    name: str
    """As Pods ask for it: ``example.com/npu``."""
    widths: tuple[tuple[str, int], ...]
    """By family, how many cores a device has."""

    def of_families(self, families: Collection[str]) -> Resource:
        """Returns it with the devices of these families only."""
        widths = tuple(width for width in self.widths if width[0] in families)
        return replace(self, widths=widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Neighbouring cores of one card, all of them by default."""

    id: str
    card_id: str
    card: Card
    cores: CoreRange
    name: str
    healthy: bool
    reason: str
    environment: tuple[tuple[str, tuple[str, ...]], ...]
    """By variable, the texts of the nodes that cover the cores, or that of the whole card:
    ``("ANVIL_CORES", ("0:0-1",))``."""
    nodes: tuple[str, ...]
    """Of a holder, relative to /dev; existing ones only."""
    host_nodes: tuple[str, ...] = ()
    """As `CardState.host_nodes`: shared, and so no part of what a holder holds."""

    @property
    def order(self) -> tuple[int, str, int]:
        return (self.card.index, self.card.family, self.cores.first)


def advertise(
    snapshot: Snapshot, resource: Resource, disabled: Collection[str] = ()
) -> tuple[Device, ...]:
    """The devices of `resource`, sorted by card number and core.

    `disabled` names cards as `names` does; they are not listed.
    """
    widths = dict(resource.widths)
    return tuple(
        device
        for state in snapshot.cards
        if state.card.family in widths and names(state).isdisjoint(disabled)
        for device in cut(state, widths[state.card.family])
    )


def device_id(card_id: str, cores: CoreRange | None) -> str:
    return card_id if cores is None else f"{card_id}{_PART}{cores}"


def names(state: CardState) -> set[str]:
    """Names of a card in the config, in lower case: ``npu0``, UUID, PCI address or ID."""
    card = state.card
    return {n.lower() for n in (card.name, card.uuid, card.pci_bus_id, state.id) if n}


def cut(state: CardState, width: int) -> tuple[Device, ...]:
    """Cuts the card into devices of `width` cores; the card keeps the last ones."""
    card = state.card
    health = state.health
    healthy = health.state is not HealthState.UNHEALTHY
    now = (state.id, healthy, health.reason, state.host_nodes)
    devices: tuple[Device, ...]
    before, devices = card.kept.get(("devices", width), (None, ()))
    if now != before:
        devices = tuple(
            _device(card, *now, CoreRange(first, first + width - 1))
            for first in range(0, card.core_count - width + 1, width)
        )
        card.kept["devices", width] = now, devices
    return devices


def _device(
    card: Card,
    card_id: str,
    healthy: bool,
    reason: str,
    host_nodes: tuple[str, ...],
    cores: CoreRange,
) -> Device:
    whole = cores == card.all_cores
    covering, uncovered = cover(card, cores)
    of_card = dict(card.access.whole_environment) if whole else {}
    if healthy and uncovered:
        node = dict(card.access.core_nodes)[CoreRange(uncovered[0], uncovered[0])]
        healthy = False
        reason = f"no device node for core {uncovered[0]}: /dev/{node} is missing"
    return Device(
        id=device_id(card_id, None if whole else cores),
        card_id=card_id,
        card=card,
        cores=cores,
        name=card.name if whole else f"{card.name}pe{cores}",
        healthy=healthy,
        reason=reason,
        environment=tuple(
            (
                variable,
                (of_card[variable],)
                if variable in of_card
                else tuple(text.replace("{cores}", str(covered)) for covered in covering),
            )
            for variable, text in card.access.environment
        ),
        nodes=tuple(n for n in card.access.nodes(None if whole else cores) if n in card.nodes),
        host_nodes=host_nodes,
    )


def cover(card: Card, cores: CoreRange) -> tuple[tuple[CoreRange, ...], tuple[int, ...]]:
    """Returns the fewest core nodes, like ``0-3`` and ``4-7``, that cover `cores`, and the rest."""
    existing = sorted(
        (covered for covered, node in card.access.core_nodes if node in card.nodes),
        key=len,
        reverse=True,
    )
    chosen: list[CoreRange] = []
    uncovered: list[int] = []
    core = cores.first
    while core <= cores.last:
        best = next((r for r in existing if r.first == core and cores.includes(r)), None)
        if best is None:
            uncovered.append(core)
            core += 1
        else:
            chosen.append(best)
            core = best.last + 1
    return tuple(chosen), tuple(uncovered)
