"""Output of commands: tables, and the same as JSON or YAML.

Loads rich only for tables, and PyYAML only for YAML.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from npu_agent.core.changes import trend_entry
from npu_agent.core.comparison import plain
from npu_agent.core.hardware import CardState, HealthState, Snapshot
from npu_agent.core.ledger import Assignment, Ledger, Usage
from npu_agent.core.pool import devices_by_name
from npu_agent.core.trends import Trends
from npu_agent.outputs.labels.compute import Explained
from npu_agent.people.cards import at_one_moment
from npu_agent.people.processes import Users
from npu_agent.text import middle, one_line
from npu_agent.wording import ENGLISH

if TYPE_CHECKING:
    import argparse

    from rich.table import Table

_GIB = 2**30
_WIDE = 400
"""Columns for what is not cut."""


def is_data(args: argparse.Namespace) -> bool:
    return args.output in ("json", "yaml")


def data(value: object, args: argparse.Namespace) -> str:
    """A value for programs, as JSON or YAML; in ASCII: it may quote bytes that are not text.

    With --watch JSON is a line, and YAML one of several documents.
    """
    several = getattr(args, "watch", False)
    if args.output == "json":
        return json.dumps(value, indent=None if several else 2)
    import yaml

    text: str = yaml.safe_dump(value, sort_keys=False, width=1 << 20)
    start = "---\n" if several else ""
    return f"{start}{text}".strip("\n")


def cards_as_json(
    snapshot: Snapshot,
    assignments: Sequence[Assignment] | None = None,
    cordons: Mapping[str, str] | None = None,
    warnings: Mapping[str, Sequence[str]] | None = None,
    users: Users | None = None,
) -> list[dict[str, Any]]:
    """The cards for programs; None where the driver, or the kubelet, does not say.

    The keys are a contract: those that there are stay. `assignments` None: it is not known who
    holds them; `cordons` are the reasons by the card's ID, `warnings` what lasts on it, else
    what this Snapshot shows; `users` are looked for where no kubelet answers.
    """
    held = _holders(snapshot, assignments or ())
    if warnings is None:
        warnings = described(at_one_moment(snapshot))
    return [
        {
            **state.card.as_json(),
            "cores": state.card.core_count,
            "health": state.health.state.value,
            "health_reason": state.health.reason,
            "cordoned": (cordons or {}).get(state.id),
            "title": state.card.title,
            "pci_dev": state.card.dev,
            "temperature": state.reading.temperature() if state.reading else None,
            "power": state.reading.power() if state.reading else None,
            "warnings": warnings.get(state.id, []),
            "load": _load(state),
            "memory": _memory(state),
            "errors": dict(state.reading.errors) if state.reading else None,
            "error_text": state.reading and state.reading.error_text,
            "throttle": state.reading and state.reading.throttle,
            "limits": _limits_as_json(state),
            "pods": None if assignments is None else held[state.id],
            "processes": None if users is None else _processes(users, state),
        }
        for state in snapshot.cards
    ]


def _processes(users: Users, state: CardState) -> list[dict[str, Any]]:
    return [process._asdict() for process in users.by_card.get(state.id, ())]


def described(trends: Trends) -> Mapping[str, Sequence[str]]:
    """Returns the trends of each card, by its ID: ``npu0 is hot: above 90 °C``."""
    texts: dict[str, list[str]] = defaultdict(list)
    for (kind, id_), trend in trends.found.items():
        texts[id_].append(ENGLISH.text(trend_entry(kind, trend)))
    return texts


def _load(state: CardState) -> float | None:
    """The mean load of its cores in per cent; None if it is not known."""
    cores = state.reading.cores if state.reading else ()
    known = [core.utilization for core in cores if core.utilization is not None]
    return round(sum(known) / len(known), 1) if known else None


def _memory(state: CardState) -> dict[str, int] | None:
    """Bytes ``used`` of the ``total``; None if it is not known.

    Drivers say nothing of the memory of free cores: none of it is taken.
    """
    read = state.reading.cores if state.reading else ()
    cores = {core.source or core.core: core for core in read}
    used = [core.dram_used for core in cores.values() if core.dram_used is not None]
    total = [core.dram_total for core in cores.values() if core.dram_total is not None]
    if used and total:
        return {"used": sum(used), "total": sum(total)}
    is_idle = len(read) == state.card.core_count and all(core.utilization == 0 for core in read)
    return {"used": 0, "total": state.card.memory} if is_idle and state.card.memory else None


def _holders(
    snapshot: Snapshot, assignments: Sequence[Assignment]
) -> dict[str, list[dict[str, str | None]]]:
    """The Pods that hold each card, by the card's ID, in the order of the cores.

    ``cores`` are ``0-3``; None for all of them.
    """
    cards = {state.id: state.card for state in snapshot.cards}
    by_card: dict[str, list[dict[str, str | None]]] = {id_: [] for id_ in cards}
    usages = _usages(snapshot, assignments)
    for usage in sorted(usages, key=lambda usage: (usage.cores, usage.assignment)):
        holder = {
            "namespace": usage.assignment.namespace,
            "pod": usage.assignment.pod,
            "cores": None if usage.cores == cards[usage.card_id].all_cores else str(usage.cores),
        }
        if holder not in by_card[usage.card_id]:
            by_card[usage.card_id].append(holder)
    return by_card


def _usages(snapshot: Snapshot, assignments: Sequence[Assignment]) -> Iterator[Usage]:
    """Yields what of present cards these assignments are; those of other devices are left out."""
    by_plugin = [assignment for assignment in assignments if not assignment.claim]
    cards = [state.card for state in snapshot.cards]
    ledger = Ledger().with_answer(by_plugin, 0.0, cards=cards, resources=())
    yield from ledger.usages(snapshot.cards)
    by_name = devices_by_name(snapshot.cards)
    for assignment in assignments:
        if assignment.claim and assignment.device in by_name:
            yield Usage(*by_name[assignment.device], assignment)


_NARROW = 100
"""Columns of a terminal that has no room for all of a table."""
_IDENTITY = ("NPU", "Name", "Temp.", "Power", "PCI-BDF", "PCI-DEV")
"""The first columns of the cards, as the vendor's own tool has them."""
_BY_WIDTH = (
    (80, ("NPU", "Name", "Temp.", "Power", "PCI-BDF", "Load", "Health")),
    (0, ("NPU", "Name", "Temp.", "Load", "Health")),
)
"""The columns of the cards on terminals narrower than `_NARROW`, by their least width."""
_LEAST_FOLDED = 10
"""Characters that a column which may be folded gets at least: ``unhealthy:``."""


def cards_table(
    snapshot: Snapshot,
    assignments: Sequence[Assignment] | None = None,
    *,
    cordons: Mapping[str, str] | None = None,
    warnings: Mapping[str, Sequence[str]] | None = None,
    users: Users | None = None,
    wide: bool = False,
) -> Table:
    """The cards for people, as wide as the terminal; `wide` has all columns.

    On a terminal unhealthy ones come first, and a card's Pods have one line. The column of Pods is
    there only where some are known; in brackets the cores of a part of a card. Other
    arguments as of `cards_as_json`.
    """
    cards = cards_as_json(snapshot, assignments, cordons, warnings, users)
    pairs = [*zip(snapshot.cards, cards, strict=True)]
    on_terminal = not wide and terminal_width() is not None
    if on_terminal:
        pairs.sort(key=lambda pair: _urgency(pair[1]))
    cards = [card for _, card in pairs]
    rows = [_cells(state, card) for state, card in pairs]
    if on_terminal:
        for card, row in zip(cards, rows, strict=True):
            row["Pod"] = _short(card["pods"] or ())
    more = ["Health", "Load", "Memory"]
    more += ["Pod"] if assignments or (wide and assignments is not None) else []
    more += ["Process"] if users and (wide or users.by_card) else []
    if wide:
        columns = [*_IDENTITY, *more, "Cores", "Limit", "Throttled", "Errors"]
        columns += ["UUID", "Serial", "Driver", "Firmware", "NUMA"]
    else:
        columns = _card_columns(rows, more)
    table = _table(columns, right=("Temp.", "Power", "Load", "Memory", "Cores"))
    for card, row in zip(cards, rows, strict=True):
        bad = card["warnings"] or card["health"] == HealthState.UNHEALTHY.value
        table.add_row(*(one_line(row[name]) for name in columns), style="red" if bad else None)
    return table


def totals(cards: Sequence[Mapping[str, Any]]) -> str:
    """``64 cards, 1 unhealthy, 12 in use``, of their JSON; without what is not known."""
    count = f"{len(cards)} {'card' if len(cards) == 1 else 'cards'}"
    unhealthy = sum(_urgency(card) == 0 for card in cards)
    degraded = sum(_urgency(card) == 1 for card in cards)
    used = sum(bool(card["pods"] or card["processes"]) for card in cards)
    parts = [count, f"{unhealthy} unhealthy"]
    parts += [f"{degraded} with a warning"] if degraded else []
    known = all(card["pods"] is not None or card["processes"] is not None for card in cards)
    parts += [f"{used} in use"] if known else []
    return ", ".join(parts)


def _urgency(card: Mapping[str, Any]) -> int:
    """Cards are sorted by it; among equals the order stays that of their numbers."""
    if card["health"] == HealthState.UNHEALTHY.value:
        return 0
    return 1 if card["warnings"] else 2


_POD = 28
"""Characters of a Pod's name on a terminal, where a row of the table has one line."""


def _short(pods: Sequence[Mapping[str, Any]]) -> str:
    """The first Pod, and how many more there are."""
    if not pods:
        return "-"
    name = middle(f"{pods[0]['namespace']}/{pods[0]['pod']}", _POD)
    if len(pods) > 1:
        return f"{name} +{len(pods) - 1}"
    return f"{name} ({pods[0]['cores']})" if pods[0]["cores"] else name


def _card_columns(rows: Sequence[Mapping[str, str]], more: Sequence[str]) -> list[str]:
    """The columns for which the terminal has room; in a pipe there is room for all."""
    width = terminal_width() or _WIDE
    for least, columns in _BY_WIDTH:
        if least <= width < _NARROW:
            return [*columns]
    fitting = [*_IDENTITY]
    for name in more:
        drawn_width = 1 + sum(_least_width(rows, column) + 3 for column in (*fitting, name))
        if drawn_width <= width:
            fitting.append(name)
    return fitting


def _least_width(rows: Sequence[Mapping[str, str]], column: str) -> int:
    widest = max(len(one_line(text)) for text in (column, *(row[column] for row in rows)))
    return min(widest, _LEAST_FOLDED) if column in _FOLDS else widest


def _fitting(columns: list[str], less: Sequence[str]) -> list[str]:
    """The columns; without some of them on a narrow terminal."""
    if (terminal_width() or _NARROW) >= _NARROW:
        return columns
    return [name for name in columns if name not in less]


def _cells(state: CardState, card: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a card by their columns; `card` is its JSON."""
    health = card["health"]
    if state.health.state is not HealthState.HEALTHY:
        health += f": {ENGLISH.reason(state.health)}"
    health = "; ".join((health, *card["warnings"]))
    if card["cordoned"] is not None:
        health += f"; cordoned: {card['cordoned']}"

    memory = card["memory"]
    throttle = card["throttle"]
    errors = [f"{label} {count}" for label, count in (card["errors"] or {}).items() if count]
    errors += [card["error_text"]] if card["error_text"] else []
    pods = [
        f"{pod['namespace']}/{pod['pod']}" + (f" ({pod['cores']})" if pod["cores"] else "")
        for pod in card["pods"] or ()
    ]
    cells = {
        "NPU": card["name"],
        "Name": card["title"],
        "Temp.": _quantity("{:.0f}°C", card["temperature"]),
        "Power": _quantity("{:.2f} W", card["power"]),
        "PCI-BDF": card["pci_bus_id"],
        "PCI-DEV": card["pci_dev"],
        "Cores": str(card["cores"]),
        "Health": health,
        "Pod": ", ".join(pods),
        "Process": ", ".join(f"{p['pid']} {p['command']}" for p in card["processes"] or ()),
        "Load": _quantity("{:.0f}%", card["load"]),
        "Memory": memory and f"{memory['used'] / _GIB:.1f}/{memory['total'] / _GIB:.0f} GiB",
        "Limit": _limit(card["limits"] or {}),
        "Throttled": None if throttle is None else ", ".join(map(plain, throttle)) or "no",
        "Errors": ", ".join(errors),
        "UUID": card["uuid"],
        "Serial": card["serial"],
        "Driver": card["driver_version"],
        "Firmware": card["firmware_version"],
        "NUMA": _quantity("{}", card["numa_node"]),
    }
    return {column: text or "-" for column, text in cells.items()}


def _quantity(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _limits_as_json(state: CardState) -> dict[str, float] | None:
    """W, MHz and °C; None where the driver has none."""
    limits = asdict(state.reading.limits) if state.reading else {}
    return {key: value for key, value in limits.items() if value is not None} or None


def _limit(limits: Mapping[str, float]) -> str:
    if "power" not in limits:
        return ""
    power = limits["power"]
    default = limits.get("default_power", power)
    return f"{power:g} of {default:g} W" if power < default else f"{power:g} W"


def allocations_as_json(
    snapshot: Snapshot, assignments: Sequence[Assignment]
) -> list[dict[str, str | None]]:
    """Returns the allocations for programs; None where no present card has the device."""
    names = {state.id: state.card.name for state in snapshot.cards}
    held = {
        usage.assignment: (names[usage.card_id], str(usage.cores))
        for usage in _usages(snapshot, assignments)
    }
    rows: list[dict[str, str | None]] = []
    for assignment in assignments:
        card, cores = held.get(assignment, (None, None))
        own = {"claim": assignment.claim or None, "card": card, "cores": cores}
        rows.append({**asdict(assignment), **own})
    return rows


def allocations_table(
    snapshot: Snapshot, assignments: Sequence[Assignment], *, wide: bool = False
) -> Table:
    """Returns the allocations for people, as wide as the terminal; `wide` has all columns."""
    columns = ["Namespace", "Pod", "Container", "Card", "Cores", "Resource", "Device"]
    columns += ["Claim"] if any(assignment.claim for assignment in assignments) else []
    rows = [
        {key.capitalize(): value or "-" for key, value in allocation.items()}
        for allocation in allocations_as_json(snapshot, assignments)
    ]
    if not wide:
        columns = _fitting(columns, ("Resource", "Device"))
    table = _table(columns)
    for cells in rows:
        table.add_row(*(one_line(cells[name]) for name in columns))
    return table


def notes(snapshot: Snapshot) -> list[str]:
    """Returns what stands below the table, a line each.

    That they are simulated; what is not served, though it may be a card that cannot be read.
    """
    simulated = any(state.card.simulated for state in snapshot.cards)
    return [
        *(["simulated: none of these cards is real"] if simulated else []),
        *(f"not served: {odd.entry}: {odd.reason}" for odd in snapshot.skipped),
    ]


def labels_table(explained: Iterable[Explained]) -> Table:
    """Renders every label of the wanted sets, and why it has its value, or none."""
    table = _table(["Label", "Value", "Why"])
    for label in explained:
        table.add_row(label.key, label.value or "-", label.why)
    return table


_FOLDS = ("Health", "Pod", "Process", "Throttled", "Errors", "Why")
"""Columns with texts, which may be folded."""


def _table(columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ASCII2, header_style="")
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in _FOLDS,
            overflow="fold",
        )
    return table


def terminal_width() -> int | None:
    """How wide the terminal is; None if stdout is none."""
    from rich.console import Console

    console = Console()
    return console.width if console.is_terminal else None


def drawn(*parts: object, wide: bool = False, headers: bool = True) -> str:
    """Tables and lines, as stdout can show them: at full width if it is not a terminal.

    Args:
        parts: each begins a line; a text is never cut or folded.
        wide: at full width on a terminal, too.
        headers: whether tables have headings and lines, or only rows.
    """
    from rich.console import Console
    from rich.table import Table

    width = None if wide else terminal_width()
    console = Console(highlight=False, markup=False, emoji=False, width=width or _WIDE)
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, Table) and not headers:
                part.show_header = False
                part.box = None
            console.print(part, crop=False, soft_wrap=isinstance(part, str))
    # What pads a table to the right says nothing.
    return "\n".join(line.rstrip(" ") for line in capture.get().removesuffix("\n").split("\n"))
