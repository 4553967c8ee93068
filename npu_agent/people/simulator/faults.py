"""Faults of a simulated card: one table for the command, its help and the tests.

A fault is something done once (`give`) and a way to look from then on (`show`, `tick`), until `ok`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from npu_agent.people.simulator.cards import CardSpec, DriverTree, suggest, swapped
from npu_agent.people.simulator.picture import Picture
from npu_agent.people.simulator.telemetry import CardTelemetry, Workload, reset, with_workload


@dataclass(frozen=True)
class SimulatedCard:
    """A card of the tree; `faults` are the names of those that last, in the order given."""

    spec: CardSpec
    telemetry: CardTelemetry
    faults: tuple[str, ...] = ()

    @property
    def driver(self) -> DriverTree:
        return self.spec.traits.driver


Show = Callable[[SimulatedCard, Picture], Picture]


@dataclass(frozen=True)
class Fault:
    """A fault of a card.

    `give` makes the card right after; `show` and `tick` change what is seen, and the card at each
    step, as long as the fault lasts.
    """

    name: str
    summary: str
    give: Callable[[SimulatedCard], SimulatedCard]
    show: Show = lambda _card, seen: seen
    tick: Callable[[CardTelemetry], CardTelemetry] = lambda state: state


def seen(card: SimulatedCard) -> Picture:
    result = card.driver.picture(card.spec, card.telemetry)
    for name in card.faults:
        result = FAULTS[name].show(card, result)
    return result


def find_fault(name: str) -> Fault:
    """The fault of that name.

    Raises:
        ValueError: there is none; the text suggests one and lists all.
    """
    if name in FAULTS:
        return FAULTS[name]
    raise ValueError(f"unknown fault {name!r}{suggest(name, FAULTS)}")


def _lasting(
    name: str,
    summary: str,
    show: Show = lambda _card, seen: seen,
    tick: Callable[[CardTelemetry], CardTelemetry] = lambda state: state,
) -> Fault:
    def give(card: SimulatedCard) -> SimulatedCard:
        others = tuple(given for given in card.faults if given != name)
        return replace(card, faults=(*others, name), telemetry=tick(card.telemetry))

    return Fault(name, summary, give, show, tick)


def _working(workload: Workload) -> Callable[[SimulatedCard], SimulatedCard]:
    return lambda card: replace(card, telemetry=with_workload(card.telemetry, workload))


def _recover(card: SimulatedCard) -> SimulatedCard:
    return replace(_working("auto")(card), faults=())


def _swap(card: SimulatedCard) -> SimulatedCard:
    return replace(card, spec=swapped(card.spec))


def _twin(card: SimulatedCard) -> SimulatedCard:
    return replace(card, spec=replace(card.spec, uuid=str(card.spec.traits.identities).upper()))


def _reset(card: SimulatedCard) -> SimulatedCard:
    return replace(card, telemetry=reset(card.telemetry))


def _broken(name: str, summary: str) -> Fault:
    """A fault that is other content in files, which the driver knows."""

    def show(card: SimulatedCard, seen: Picture) -> Picture:
        changed = card.driver.broken(card.spec, card.telemetry).get(name, {})
        # Nothing appears on a card that is gone.
        tree = {path: changed.get(path, content) for path, content in seen.items()}
        return {path: content for path, content in tree.items() if content is not None}

    return _lasting(name, summary, show)


_dead = _broken("dead", "the driver says that the card does not work")


def _flap(card: SimulatedCard, seen: Picture) -> Picture:
    return _dead.show(card, seen) if card.telemetry.ticks % 2 == 0 else seen


def _more_errors(state: CardTelemetry) -> CardTelemetry:
    return replace(state, errors=state.errors + 1)


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        _dead,
        _broken("hot", "the sensors say more than 95 °C; the load stays as it is"),
        _lasting(
            "errors",
            "errors: the counters rise, or where there are none a text changes",
            tick=_more_errors,
        ),
        _broken("slow", "its power limit is too low: 1700 MHz in place of 2000"),
        _broken("narrow", "its PCIe link has 8 lanes in place of 16"),
        _broken("hang", "reading whether it works never returns"),
        _broken("garbage", "files answer with binary, cut-off or huge content"),
        _broken("unreadable", "reading its state fails with an error, even for root"),
        _lasting("flap", "it works and does not work in turns, each second", _flap),
        _broken("no-node", "the device node of its first core is missing"),
        _lasting("gone", "drained: its files and device nodes vanish", lambda *_: {}),
        Fault("twin", "its UUID is that of each card with this fault, until a swap", _twin),
        Fault("swap", "another card in the same slot: new UUID and serial number", _swap),
        Fault("reset", "the device was reset: what it counts starts again from 0", _reset),
        Fault("busy", "all cores at high load, as one container holds them", _working("busy")),
        Fault("busy-one", "its first core at high load, the others free", _working("single")),
        Fault("idle", "no load", _working("idle")),
        Fault("ok", "all is well again", _recover),
        Fault("back", "a card that was gone returns, and all is well again", _recover),
    )
}
