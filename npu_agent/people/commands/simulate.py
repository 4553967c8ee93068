"""`npu-agent simulate`: makes a simulated driver tree, keeps it alive, breaks cards in it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from npu_agent.cli import WRONG, CommandError
from npu_agent.people import simulator
from npu_agent.people.commands.screen import run_until_signal
from npu_agent.people.simulator import CardSpec, SimulatedCard, SimulatorError, replay
from npu_agent.text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _faults_text()
    add = parser.add_argument
    add("root", metavar="ROOT", type=Path, help="directory of the simulated tree")
    add(
        "simulate_action",
        metavar="fault|status",
        nargs="?",
        choices=("fault", "status"),
        help="fault: inject a fault into a card; status: show the cards of ROOT",
    )
    add("card", metavar="CARD", nargs="?", help="npu0, a UUID or PCI address")
    add("fault", metavar="FAULT", nargs="?", help="one of the list below")
    add(
        "--cards",
        metavar="FAMILY=COUNT,...",
        help="cards in their order "
        f"(default: those that ROOT has, else {simulator.default_cards()})",
    )
    add(
        "--driver",
        metavar="RELEASE",
        help="an older driver for the cards that have one, such as 2025.4 (default: the newest)",
    )
    add(
        "--from",
        dest="record",
        metavar="FILE",
        type=Path,
        help="show what `npu-agent record` wrote on a host, and exit; ROOT has to be new or empty",
    )
    add("--once", action="store_true", help="make the tree and exit")
    add("--list", action="store_true", help="list the faults")


def main(args: argparse.Namespace) -> int:
    """Makes or changes the tree."""
    try:
        _act(args)
    except ValueError as error:
        raise CommandError(str(error), WRONG) from error
    except SimulatorError as error:
        raise CommandError(str(error)) from error
    return 0


def _act(args: argparse.Namespace) -> None:
    if args.list:
        print(_faults_text())
    elif args.record is not None:
        if args.simulate_action or args.cards is not None or args.driver is not None:
            raise ValueError("--from: the record says which cards there are; leave out the rest")
        print(_replay(args.root, args.record))
    elif args.simulate_action is None:
        _make(args.root, args.cards, args.driver, once=args.once)
    elif args.simulate_action == "fault":
        _fault(args.root, args.card, args.fault)
    elif args.card is not None:
        raise ValueError(f"status: one argument too many: {args.card}")
    else:
        for card in simulator.cards(args.root):
            print(_line(card))


def _make(root: Path, wanted: str | None, driver: str | None, *, once: bool) -> None:
    specs = _specs(root, wanted)
    if driver is not None:
        specs = simulator.with_driver(specs, driver)
    simulator.make(root, specs)
    summary = _summary(root, specs, once=once)
    if once:
        print(summary)
    else:
        run_until_signal(_live(root, summary))
        print("stopped; the tree stays as it is")


def _replay(root: Path, file: Path) -> str:
    recording = replay.load(file)
    simulator.show(root, recording.picture(), recording.manifest.directories)
    incomplete = recording.manifest.incomplete
    count = len(recording.contents)
    return "\n".join(
        (
            f"The record {file} is in {root}: {count} files",
            *([f"it is not complete: {one_line(incomplete)}"] if incomplete else []),
            f"its cards:     npu-agent info --host-root {root}",
            "its values do not change",
        )
    )


def _specs(root: Path, wanted: str | None) -> Sequence[CardSpec]:
    if wanted is not None:
        return simulator.parse_cards(wanted)
    try:
        return [card.spec for card in simulator.cards(root)]
    except SimulatorError:  # not made yet, or not ours: simulator.make() says which
        return simulator.parse_cards(simulator.default_cards())


async def _live(root: Path, summary: str) -> None:
    print(summary, flush=True)
    await simulator.simulate(root)


def _fault(root: Path, card: str | None, fault: str | None) -> None:
    if card is None or fault is None:
        raise ValueError(
            f"fault: give a card and a fault, such as: fault npu0 dead\n{_faults_text()}"
        )
    simulator.apply_fault(root, card, fault)
    print(f"{card}: {simulator.FAULTS[fault]}")


def _line(card: SimulatedCard) -> str:
    spec = card.spec
    state = card.telemetry
    return (
        f"{spec.name:8} {spec.traits.title:18} {spec.pci_bus_id} {spec.uuid}  "
        f"load {state.mean_load:4.0%} ({state.workload})  "
        f"{max(state.temperature):.0f}°C {state.watts:.2f} W  {', '.join(card.faults) or 'ok'}"
    )


def _summary(root: Path, specs: Sequence[CardSpec], *, once: bool) -> str:
    rows = [
        f"  {spec.name:8} {spec.traits.title:18} {spec.pci_bus_id}  NUMA node {spec.numa_node}"
        for spec in specs
    ]
    first = specs[0].name if specs else "npu0"
    return "\n".join(
        (
            f"A simulated driver tree is in {root}:",
            *(rows or ["  no cards"]),
            f"its cards:     npu-agent info --host-root {root}",
            f"break a card:  npu-agent simulate {root} fault {first} dead   (repair it: ... ok)",
            "its values do not change; leave out --once to let them change"
            if once
            else "It changes until you press Ctrl-C.",
        )
    )


def _faults_text() -> str:
    width = max(map(len, simulator.FAULTS))
    lines = (f"  {name:{width}}  {summary}" for name, summary in simulator.FAULTS.items())
    return "\n".join(("faults:", *lines))
