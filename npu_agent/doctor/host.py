"""The host's hardware: /sys and /dev, drivers, cards and their device nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent.config import disabled_for
from npu_agent.core.hardware import Card, CardState, Oddity, Snapshot
from npu_agent.core.hardware import State as Health
from npu_agent.core.offer import Device, Resource, advertise
from npu_agent.doctor.check import Check, State, Unseen
from npu_agent.doctor.look import (
    DEADLINE,
    Directory,
    content,
    directory,
    is_device,
    look,
    plain_nodes,
    seen,
)
from npu_agent.doctor.situation import Situation
from npu_agent.inventory.inventory import read_once
from npu_agent.vendors.furiosa import parse
from npu_agent.vendors.furiosa.families import FAMILIES
from npu_agent.vendors.furiosa.sysfs import Furiosa

_VENDOR = "0x1ed2"
"""FuriosaAI's PCI vendor ID, as sysfs writes it."""
_HANDED_ON = "vfio"
"""How drivers begin that hand a card to a virtual machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciCard:
    """One of the vendor's devices on the PCI bus."""

    address: str
    device: str
    """``0x0000``."""
    driver: str | None
    """None: none is bound to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """All that was seen of it."""

    sys: Directory | Unseen
    dev: Directory | Unseen
    drivers: frozenset[str] | Unseen
    """Families whose driver shows a directory in /sys/class."""
    pci: tuple[PciCard, ...] | Unseen
    claimed: frozenset[str] | Unseen
    """PCI addresses of all entries in /sys/class, odd ones too."""
    snapshot: Snapshot | Unseen
    nodes: Mapping[tuple[str, int], tuple[str, ...]] | Unseen
    """What is wrong with device nodes, for each card."""
    host_beside: bool
    """Whether the host's /sys is mounted where the DaemonSet mounts it."""


async def hardware(situation: Situation) -> Hardware:
    """Looks at all of it."""
    root = situation.host_root
    snapshot, sys, dev, drivers, pci, claimed = await asyncio.gather(
        seen(asyncio.wait_for(read_once([Furiosa(root)]), DEADLINE)),
        look(lambda: directory(root / "sys/class")),
        look(lambda: directory(root / "dev")),
        look(lambda: _drivers(root)),
        look(lambda: _pci(root)),
        look(lambda: _claimed(root)),
    )
    beside = await look(lambda: Path("/host/sys/class").is_dir())
    if isinstance(sys, Directory) and not sys.readable:
        # Without it everything looks like a host without cards, which would be told of as one.
        blind = Unseen("/sys is not to be seen: see there")
        return replace(unseen(blind), sys=sys, dev=dev, host_beside=beside is True)
    nodes: Mapping[tuple[str, int], tuple[str, ...]] | Unseen = {}
    if isinstance(snapshot, Snapshot):
        cards = [state.card for state in snapshot.cards]
        nodes = await look(lambda: {card.key: tuple(_bad_nodes(root, card)) for card in cards})
    return Hardware(
        sys=sys,
        dev=dev,
        drivers=drivers,
        pci=pci,
        claimed=claimed,
        snapshot=snapshot,
        nodes=nodes,
        host_beside=beside is True,
    )


def unseen(why: Unseen) -> Hardware:
    """Nothing of it was seen."""
    return Hardware(
        sys=why,
        dev=why,
        drivers=why,
        pci=why,
        claimed=why,
        snapshot=why,
        nodes=why,
        host_beside=False,
    )


def _drivers(root: Path) -> frozenset[str]:
    return frozenset(
        family.name
        for family in FAMILIES.values()
        if (root / "sys/class" / family.class_dir).is_dir()
    )


def _pci(root: Path) -> tuple[PciCard, ...]:
    found = []
    bus = root / "sys/bus/pci/devices"
    for address in sorted(os.listdir(bus) if bus.is_dir() else ()):  # noqa: PTH208 (names)
        vendor = content(bus / address / "vendor", 64)
        if vendor is None or vendor.decode(errors="replace").strip().lower() != _VENDOR:
            continue
        device = content(bus / address / "device", 64) or b""
        link = bus / address / "driver"
        found.append(
            PciCard(
                address=address,
                device=device.decode(errors="replace").strip(),
                driver=link.readlink().name if link.is_symlink() else None,
            )
        )
    return tuple(found)


def _claimed(root: Path) -> frozenset[str]:
    entries = Furiosa(root).scan()
    found = (parse.pci_address(content(Path(entry.path, "busname"), 64)) for entry in entries)
    return frozenset(filter(None, found))


def _bad_nodes(root: Path, card: Card) -> Iterator[str]:
    """Looked at, never opened: opening a node takes the core."""
    plain = plain_nodes(root)
    for node in FAMILIES[card.family].nodes(card.index):
        try:
            mode = (root / "dev" / node).stat().st_mode
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            yield f"/dev/{node} {'is missing' if missing else f'({error.strerror})'}"
            continue
        if not is_device(mode, plain=plain):
            yield f"/dev/{node} is no character device"


def offered(situation: Situation, resource: Resource, snapshot: Snapshot) -> tuple[Device, ...]:
    """The devices of a resource that this hardware has, by the agent's own reckoning."""
    disabled = disabled_for(situation.config, situation.node_name)
    return advertise(snapshot, resource, disabled)


def checks(situation: Situation, found: Hardware) -> Iterator[Check]:
    """What it means."""
    if situation.in_pod and situation.host_root == Path("/") and found.host_beside:
        yield Check(
            "host root",
            State.WRONG,
            "this looks at the container's own / and not at the host's",
            "npu-agent doctor --host-root=/host",
        )
    yield _mounted("/sys", situation, found.sys)
    yield _mounted("/dev", situation, found.dev)
    yield from _of_drivers(found)
    yield _of_pci(found)
    if isinstance(found.snapshot, Unseen):
        yield found.snapshot.check("cards", remedy="dmesg: a driver may hang")
        return
    cards = found.snapshot.cards
    if cards:
        names = ", ".join(f"{state.card.name} ({state.card.product})" for state in cards)
        yield Check("cards", State.OK, f"{len(cards)}: {names}")
    else:
        yield Check("cards", State.NOTE, "none: the agent serves nothing, and waits for some")
    for state in cards:
        yield _of_card(situation, state, found.nodes)
    for odd in found.snapshot.odd:
        yield _of_oddity(odd)


def _mounted(name: str, situation: Situation, found: Directory | Unseen) -> Check:
    path = situation.host_root / name.strip("/")
    if isinstance(found, Unseen):
        return found.check(name)
    if not found.there:
        return Check(
            name,
            State.WRONG,
            f"{found.path} is missing",
            f"mount the host's {name} at {path} (hostPath, readOnly), and name what it is below "
            "by --host-root",
        )
    if not found.readable:
        return Unseen(f"{found.path} ({found.owner}) is not for uid {situation.uid}", True).check(
            name
        )
    return Check(name, State.OK, f"{path} can be read")


def _of_drivers(found: Hardware) -> Iterator[Check]:
    for family in FAMILIES.values():
        name = f"driver {family.name}"
        if isinstance(found.drivers, Unseen):
            yield found.drivers.check(name)
        elif family.name in found.drivers:
            yield Check(name, State.OK, f"loaded: /sys/class/{family.class_dir}")
        else:
            yield Check(
                name,
                State.UNUSED,
                f"not loaded (no /sys/class/{family.class_dir}); only a {family.title} needs it",
            )


def _of_pci(found: Hardware) -> Check:
    """Whether every card on the bus has come to be one in /sys/class."""
    name = "PCI"
    if isinstance(found.pci, Unseen):
        return found.pci.check(name)
    if not found.pci:
        return Check(name, State.OK, "no FuriosaAI device (vendor 1ed2) on the bus")
    if isinstance(found.claimed, Unseen):
        return found.claimed.check(name)
    lost = [card for card in found.pci if card.address not in found.claimed]
    given_away = [card for card in lost if card.driver and card.driver.startswith(_HANDED_ON)]
    unbound = [card for card in lost if card.driver is None]
    silent = [card for card in lost if card not in given_away and card not in unbound]
    if unbound:
        return Check(
            name,
            State.WRONG,
            f"no driver is bound to {_addresses(unbound)}",
            "install and load the vendor's driver for this kernel, and look at dmesg; one that "
            "was drained on purpose: echo ADDRESS > /sys/bus/pci/drivers_probe",
        )
    if silent:
        return Check(
            name,
            State.WRONG,
            f"{_addresses(silent)} has a driver ({silent[0].driver}), which shows no card of that "
            "address in /sys/class",
            "dmesg: why did the driver give up on it? Then load it anew",
        )
    count = f"{len(found.pci)} FuriosaAI device{'s' * (len(found.pci) > 1)}"
    if given_away:
        return Check(
            name,
            State.NOTE,
            f"{count}; {_addresses(given_away)} is handed on by {given_away[0].driver}, so not "
            "served here",
        )
    return Check(name, State.OK, f"{count} on the bus")


def _addresses(cards: list[PciCard]) -> str:
    return ", ".join(f"{card.address} (1ed2:{card.device.removeprefix('0x')})" for card in cards)


def _of_card(
    situation: Situation,
    state: CardState,
    nodes: Mapping[tuple[str, int], tuple[str, ...]] | Unseen,
) -> Check:
    card, health = state.card, state.health
    name = f"card {card.name}"
    if health.state is Health.UNHEALTHY:
        return Check(
            name,
            State.WRONG,
            f"unhealthy: {health.reason}",
            "it is not handed out until it works again: dmesg, then drain it, reload its driver "
            "or power-cycle the host",
        )
    if isinstance(nodes, Unseen):
        return nodes.check(name)
    if bad := nodes.get(card.key, ()):
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        return Check(
            name,
            State.WRONG,
            f"{', '.join(bad[:3])}{more}",
            "the driver and udev make its nodes: reload the driver; in a container, mount the "
            "host's /dev",
        )
    disabled = disabled_for(situation.config, situation.node_name)
    names = {text.lower() for text in (card.name, card.uuid, card.pci_bus_id, state.id) if text}
    if names & {text.lower() for text in disabled}:
        return Check(name, State.NOTE, "not handed out: the config's disabledDevices names it")
    count = len(FAMILIES[card.family].nodes(card.index))
    return Check(
        name, State.OK, f"{health.state.value} ({health.reason}); {count} device nodes; {state.id}"
    )


def _of_oddity(odd: Oddity) -> Check:
    name = f"odd {Path(odd.entry).name}"
    if odd.unread:
        return Check(
            name,
            State.WRONG,
            f"{odd.entry}: {odd.reason}",
            "it may be a card, and cannot be read: dmesg, then reload its driver",
        )
    return Check(
        name,
        State.NOTE,
        f"{odd.entry} is not served: {odd.reason}",
        "" if odd.sample_of else "a card newer than this npu-agent? Then take a newer one",
    )
