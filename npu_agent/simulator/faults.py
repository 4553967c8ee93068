"""What can be done to a simulated card: one table, used by the command, its help and the tests.

A fault is something done once (`give`) and a way to look from then on (`show`, `tick`), until `ok`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from npu_agent.simulator.cards import CardSpec, swapped
from npu_agent.simulator.picture import (
    Content,
    Picture,
    Special,
    core,
    hwmon,
    liveness,
    management,
    node,
    picture,
)
from npu_agent.simulator.telemetry import CardTelemetry, reset, with_workload
from npu_agent.text import closest


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
    result = picture(card.spec, card.telemetry)
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
    close = closest(name, FAULTS)
    hint = f"; did you mean {close!r}?" if close else ""
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
    return _changed(seen, {liveness(card.spec): "0\n"})


def _flap(card: SimulatedCard, seen: Picture) -> Picture:
    return _dead(card, seen) if card.telemetry.ticks % 2 == 0 else seen


def _hang(card: SimulatedCard, seen: Picture) -> Picture:
    return _changed(seen, {liveness(card.spec): Special.FIFO})


def _hot(card: SimulatedCard, seen: Picture) -> Picture:
    # Only what the sensors say: load and power stay, as with a fan that failed. 40 to 70 °C become
    # 97 to 103 °C at once, so that a tree made with --once shows it, too.
    cool = card.telemetry
    warm = replace(cool, temperature=tuple(97.0 + (t - 40.0) / 5 for t in cool.temperature))
    hot = picture(card.spec, warm).files
    changes = {
        path: content
        for path, content in hot.items()
        if path.startswith(f"{hwmon(card.spec)}/temp")
    }
    return _changed(seen, changes)


def _errors(state: CardTelemetry) -> CardTelemetry:
    return replace(state, errors=state.errors + 1)


def _garbage(card: SimulatedCard, seen: Picture) -> Picture:
    directory, sensors = management(card.spec), hwmon(card.spec)
    changes: dict[str, Content] = {
        liveness(card.spec): b"\xff\xfe\x00\x80" * 16,  # not text
        f"{directory}/heartbeat": "9" * (1 << 20),  # a number, but huge
        f"{directory}/atr_error": "AXI Post Error: 0\nAXI Fetch Er",  # ends in the middle
        f"{directory}/fw_version": b"\x00\xc3(\x9f",
        f"{directory}/npu_clocks": "pe0 (MHz)\n: 5\n\n:::\n",
        f"{directory}/ne_clk_freq_info": "ne tensor (MHz)\n: 5\n\n:::\n",
        f"{sensors}/temp1_input": b"\x80\x81\x82",
        f"{sensors}/temp2_input": "warm\n",
        f"{sensors}/power1_average": "",
        f"{core(card.spec, '0')}/perf_regs": "TaskExecutionTime: 0xZZ\nCycleCount: 0x",
        f"{core(card.spec, '0')}/metrics": b"CycleCount: \xff\xff\n",
        f"{core(card.spec, '0')}/alloc_status": "x" * (1 << 16),
    }
    return _changed(seen, changes)


def _unreadable(card: SimulatedCard, seen: Picture) -> Picture:
    live = {liveness(card.spec), f"{management(card.spec)}/heartbeat"}
    live |= {f"{management(card.spec)}/atr_error", f"{hwmon(card.spec)}/power1_average"}
    live |= {f"{hwmon(card.spec)}/temp1_input"}
    live |= {f"{core(card.spec, '0')}/{name}" for name in ("perf_regs", "metrics")}
    return _changed(seen, dict.fromkeys(sorted(live), Special.DIRECTORY))


def _no_node(card: SimulatedCard, seen: Picture) -> Picture:
    return replace(seen, nodes=seen.nodes - {node(card.spec, "pe0")})


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
