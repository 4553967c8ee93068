"""Faults of a simulated card: one table for the command, its help and the tests.

A fault is done once (`given`); one that lasts changes what is `seen`, and each `step`, until `ok`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from npu_agent.people.simulator import driver
from npu_agent.people.simulator.cards import CardSpec, swapped
from npu_agent.people.simulator.families import IDENTITIES
from npu_agent.people.simulator.picture import Content, Picture
from npu_agent.people.simulator.telemetry import (
    CardTelemetry,
    Workload,
    advance,
    reset,
    with_workload,
)

FAULTS: Mapping[str, str] = {
    "dead": "the driver says that the card does not work",
    "hot": "the sensors say more than 95 °C; the load stays as it is",
    "errors": "errors: the counters rise, or where there are none a text changes",
    "slow": "its power limit is too low: 1700 MHz in place of 2000",
    "narrow": "its PCIe link has 8 lanes in place of 16",
    "slow-link": "its PCIe link has 8 GT/s in place of 16 or 32",
    "bus-errors": "the kernel counts errors of it on the PCI bus",
    "hang": "reading whether it works never returns",
    "garbage": "files answer with binary, cut-off or huge content",
    "unreadable": "reading its state fails with an error, even for root",
    "flap": "it works and does not work in turns, each second",
    "no-node": "the device node of its first core is missing",
    "gone": "drained: its files and device nodes vanish",
    "twin": "its UUID is that of each card with this fault, until a swap",
    "swap": "another card in the same slot: new UUID and serial number",
    "reset": "the device was reset: what it counts starts again from 0",
    "busy": "all cores at high load, as one container holds them",
    "busy-one": "its first core at high load, the others free",
    "idle": "no load",
    "ok": "all is well again",
    "back": "a card that was gone returns, and all is well again",
}
"""What each does, for people."""
Held = Mapping[str, frozenset[int]]
"""The cores that containers hold, by `npu_agent.core.hardware.CardState.id`."""
_WORKLOADS: Mapping[str, Workload] = {"busy": "busy", "busy-one": "single", "idle": "idle"}


@dataclass(frozen=True)
class SimulatedCard:
    """A card of the tree; `faults` are the names of those that last, in the order given."""

    spec: CardSpec
    telemetry: CardTelemetry
    faults: tuple[str, ...] = ()


def given(card: SimulatedCard, fault: str) -> SimulatedCard:
    """The card right after this was done to it."""
    match fault:
        case "twin":
            uuid = str(IDENTITIES).upper()
            return replace(card, spec=replace(card.spec, uuid=uuid))
        case "swap":
            return replace(card, spec=swapped(card.spec))
        case "reset":
            return replace(card, telemetry=reset(card.telemetry))
        case "busy" | "busy-one" | "idle":
            return replace(card, telemetry=with_workload(card.telemetry, _WORKLOADS[fault]))
        case "ok" | "back":
            return replace(card, telemetry=with_workload(card.telemetry, "auto"), faults=())
    others = tuple(name for name in card.faults if name != fault)
    errors = card.telemetry.errors + (fault == "errors")
    return replace(card, faults=(*others, fault), telemetry=replace(card.telemetry, errors=errors))


def step(card: SimulatedCard, dt: float, held: Held | None = None) -> SimulatedCard:
    """The card `dt` seconds later, with load where it is held."""
    spec = card.spec
    cores: frozenset[int] | None = None
    if held is not None:
        ids = (spec.uuid, spec.serial, spec.pci_bus_id, spec.name)
        cores = next((held[id_] for id_ in ids if id_ in held), frozenset())
    state = advance(card.telemetry, dt, shift=60.0 * spec.index, held=cores)
    errors = state.errors + ("errors" in card.faults)
    return replace(card, telemetry=replace(state, errors=errors))


def seen(card: SimulatedCard) -> Picture:
    """What the driver shows of the card; nothing appears on one that is gone."""
    if "gone" in card.faults:
        return {}
    picture: Mapping[str, Content | None] = driver.picture(card.spec, card.telemetry)
    broken = driver.broken(card.spec, card.telemetry) if card.faults else {}
    for fault in card.faults:
        is_dead = fault == "flap" and card.telemetry.ticks % 2 == 0
        changed = broken.get("dead" if is_dead else fault, {})
        picture = {path: changed.get(path, content) for path, content in picture.items()}
    return {path: content for path, content in picture.items() if content is not None}
