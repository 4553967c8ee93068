"""What can be done to a simulated card: one table, used by the command, its help and the tests.

A fault is something done once (`give`) and a way to look from then on (`show`, `tick`), until `ok`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from npu_agent.simulator.cards import CardSpec, swapped
from npu_agent.simulator.picture import Content, Picture, Special
from npu_agent.simulator.telemetry import CardTelemetry, reset, with_workload


@dataclass(frozen=True)
class SimulatedCard:
    """A card of the tree: who it is, how it is doing, and what is wrong with it.

    Attributes:
        spec: identity and place.
        telemetry: its last moment.
        faults: names of the faults that last, in the order given.
    """

    spec: CardSpec
    telemetry: CardTelemetry
    faults: tuple[str, ...] = ()


Show = Callable[[SimulatedCard, Picture], Picture]


@dataclass(frozen=True)
class Fault:
    """One thing that can be done to a card.

    Attributes:
        name: as the command spells it.
        summary: one line for people.
        give: the card right after.
        show: changes what is to be seen of a card, as long as the fault lasts.
        tick: changes the card at each step, as long as the fault lasts.
    """

    name: str
    summary: str
    give: Callable[[SimulatedCard], SimulatedCard]
    show: Show = lambda _card, seen: seen
    tick: Callable[[CardTelemetry], CardTelemetry] = lambda state: state


def seen(card: SimulatedCard) -> Picture:
    """What the tree shows of a card, with all its faults."""
    result = card.spec.traits.driver.picture(card.spec, card.telemetry)
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
    close = get_close_matches(name, FAULTS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown fault {name!r}{hint} (there are: {', '.join(FAULTS)})")


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


def _recover(card: SimulatedCard) -> SimulatedCard:
    return replace(card, faults=(), telemetry=with_workload(card.telemetry, "auto"))


def _swap(card: SimulatedCard) -> SimulatedCard:
    return replace(card, spec=swapped(card.spec))


def _busy(card: SimulatedCard) -> SimulatedCard:
    return replace(card, telemetry=with_workload(card.telemetry, "busy"))


def _busy_one(card: SimulatedCard) -> SimulatedCard:
    return replace(card, telemetry=with_workload(card.telemetry, "single"))


def _reset(card: SimulatedCard) -> SimulatedCard:
    return replace(card, telemetry=reset(card.telemetry))


def _idle(card: SimulatedCard) -> SimulatedCard:
    return replace(card, telemetry=with_workload(card.telemetry, "idle"))


def _changed(seen: Picture, changes: Mapping[str, Content]) -> Picture:
    """With other content in files that are there; nothing appears on a card that is gone."""
    there = {path: content for path, content in changes.items() if path in seen.files}
    return replace(seen, files={**seen.files, **there})


def _dead(card: SimulatedCard, seen: Picture) -> Picture:
    return _changed(seen, {card.spec.traits.driver.liveness(card.spec): "0\n"})


def _flap(card: SimulatedCard, seen: Picture) -> Picture:
    return _dead(card, seen) if card.telemetry.ticks % 2 == 0 else seen


def _hang(card: SimulatedCard, seen: Picture) -> Picture:
    return _changed(seen, {card.spec.traits.driver.liveness(card.spec): Special.FIFO})


def _hot(card: SimulatedCard, seen: Picture) -> Picture:
    # Only what the sensors say: load and power stay, as with a fan that failed. 40 to 70 °C become
    # 97 to 103 °C at once, so that a tree made with --once shows it, too.
    cool = card.telemetry
    warm = replace(cool, temperature=tuple(97.0 + (t - 40.0) / 5 for t in cool.temperature))
    driver = card.spec.traits.driver
    files, sensors = driver.picture(card.spec, warm).files, driver.temperatures(card.spec)
    return _changed(seen, {path: said for path, said in files.items() if path.startswith(sensors)})


def _errors(state: CardTelemetry) -> CardTelemetry:
    return replace(state, errors=state.errors + 1)


def _garbage(card: SimulatedCard, seen: Picture) -> Picture:
    return _changed(seen, card.spec.traits.driver.garbage(card.spec))


def _unreadable(card: SimulatedCard, seen: Picture) -> Picture:
    files = card.spec.traits.driver.unreadable(card.spec)
    return _changed(seen, dict.fromkeys(files, Special.DIRECTORY))


def _no_node(card: SimulatedCard, seen: Picture) -> Picture:
    return replace(seen, nodes=seen.nodes - {card.spec.traits.driver.first_core_node(card.spec)})


def _gone(_card: SimulatedCard, _seen: Picture) -> Picture:
    return Picture()


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        _lasting("dead", "the driver says that the card does not work", _dead),
        _lasting("hot", "the sensors say more than 95 °C; the load stays as it is", _hot),
        _lasting("errors", "the error counters rise", tick=_errors),
        _lasting("hang", "reading whether it works never returns", _hang),
        _lasting("garbage", "files answer with binary, cut-off or huge content", _garbage),
        _lasting("unreadable", "reading its state fails with an error, even for root", _unreadable),
        _lasting("flap", "it works and does not work in turns, each second", _flap),
        _lasting("no-node", "the device node of its first core is missing", _no_node),
        _lasting("gone", "drained: its files and device nodes vanish", _gone),
        Fault("swap", "another card in the same slot: new UUID and serial number", _swap),
        Fault("reset", "the device was reset: what it counts begins anew", _reset),
        Fault("busy", "all cores at high load, as one container holds them", _busy),
        Fault("busy-one", "its first core at high load, the others free", _busy_one),
        Fault("idle", "no load", _idle),
        Fault("ok", "all is well again", _recover),
        Fault("back", "a card that was gone returns, and all is well again", _recover),
    )
}
