"""What people see in a terminal: tables, and the same as JSON. Loads rich only for tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.core.ledger import Assignment, Ledger
from npu_agent.core.pool import devices_by_name
from npu_agent.outputs.labels.compute import Explained

if TYPE_CHECKING:
    from rich.table import Table


def cards_as_json(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The cards for programs; None where the driver does not say. Keys are a contract (spec 1)."""
    return [
        {
            "name": state.card.name,
            "family": state.card.family,
            "product": state.card.product,
            "uuid": state.card.uuid,
            "serial": state.card.serial,
            "pci_bus_id": state.card.pci_bus_id,
            "cores": state.card.core_count,
            "driver_version": state.card.driver_version,
            "firmware_version": state.card.firmware_version,
            "numa_node": state.card.numa_node,
            "health": state.health.state.value,
        }
        for state in snapshot.cards
    ]


def cards_table(snapshot: Snapshot, assignments: Sequence[Assignment] = ()) -> Table:
    """The cards for people.

    The column of Pods is there only where some are known; the one that says how cards are cut, and
    for whom, only where one of them has a part of a card.
    """
    held = _held(snapshot, assignments)
    columns = ["NPU", "Name", "Temp.", "Power", "PCI-BDF", "PCI-DEV", "Cores", "Health"]
    cut = any(part for holders in held.values() for part, _ in holders)
    columns += ["Cut"] if cut else []
    columns += ["Pod"] if assignments else []
    table = _table(columns, right=("Temp.", "Power", "Cores"))
    for state in snapshot.cards:
        cells, holders = _cells(state), held.get(state.id, [])
        if cut:
            parts = dict.fromkeys(f"{part} {pod}" for part, pod in holders if part)
            cells.append(", ".join(parts) or "-")
        if assignments:
            cells.append(", ".join(sorted({pod for _, pod in holders})) or "-")
        style = "red" if state.health.state is HealthState.UNHEALTHY else None
        table.add_row(*cells, style=style)
    return table


def _held(
    snapshot: Snapshot, assignments: Sequence[Assignment]
) -> dict[str, list[tuple[str, str]]]:
    """By the card's ID, what Pods hold of it: the cores, "" for all of them, and the Pod."""
    cards = {state.id: state.card for state in snapshot.cards}
    plain = [one for one in assignments if not one.claim]
    ledger = Ledger().answered(plain, 0.0, cards=cards.values(), resources=())
    by_name = devices_by_name(snapshot.cards)
    holdings = [
        *((one.card_id, one.cores, one.assignment) for one in ledger.holdings(snapshot.cards)),
        *(
            (*by_name[one.device], one)
            for one in assignments
            if one.claim and one.device in by_name
        ),
    ]
    held: dict[str, list[tuple[str, str]]] = {}
    for card_id, cores, holder in sorted(holdings, key=lambda one: (one[1], one[2])):
        part = "" if cores == cards[card_id].all_cores else str(cores)
        held.setdefault(card_id, []).append((part, f"{holder.namespace}/{holder.pod}"))
    return held


def _cells(state: CardState) -> list[str]:
    card, reading = state.card, state.reading
    temperature = reading.temperature() if reading else None
    power = reading.power() if reading else None
    health = state.health.state.value
    if state.health.state is not HealthState.HEALTHY:
        health += f": {state.health.reason}"
    return [
        card.name,
        card.title,
        "-" if temperature is None else f"{temperature:.0f}°C",
        "-" if power is None else f"{power:.2f} W",
        card.pci_bus_id or "-",
        card.dev or "-",
        str(card.core_count),
        health,
    ]


def assignments_table(assignments: Sequence[Assignment]) -> Table:
    """Which container holds which device; the column of claims only where there are some."""
    columns = ["Namespace", "Pod", "Container", "Resource", "Device"]
    claims = any(one.claim for one in assignments)
    table = _table([*columns, "Claim"] if claims else columns)
    for one in assignments:
        cells = [one.namespace, one.pod, one.container, one.resource, one.device]
        table.add_row(*cells, *([one.claim or "-"] if claims else []))
    return table


def labels_table(explained: Iterable[Explained]) -> Table:
    """Every label that the wanted sets can have, and why it has its value, or none."""
    table = _table(["Label", "Value", "Why"])
    for one in explained:
        table.add_row(one.key, one.value or "-", one.why)
    return table


def _table(columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ASCII2, header_style="")
    for name in columns:
        table.add_column(
            name, justify="right" if name in right else "left", no_wrap=name != "Health"
        )
    return table


def show(*parts: object) -> None:
    """Prints tables and lines to stdout, at full width when that is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=400)
    for part in parts:
        console.print(part)
