"""The host's hardware: /sys and /dev, drivers, cards and their device nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_agent.config import disabled_for
from npu_agent.core.hardware import Card, CardState, Oddity, Snapshot
from npu_agent.core.hardware import HealthState as Health
from npu_agent.core.offer import Device, Resource, advertise
from npu_agent.core.trouble import TroubleKind
from npu_agent.doctor.check import Check, Finding, Unseen, have, line, note, ok, unused, wrong
from npu_agent.doctor.probe import DEADLINE, Directory, directory, probe, seen
from npu_agent.doctor.situation import Driver, Situation, Vendor
from npu_agent.files import content, is_device

_HANDED_ON = "vfio"
"""How drivers begin that hand a card to a virtual machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciCard:
    """One of the vendor's devices on the PCI bus."""

    address: str
    device: str
    """``0000``."""
    driver: str | None
    """None: none is bound to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """All that was seen of it."""

    sys: Directory | Unseen
    dev: Directory | Unseen
    drivers: frozenset[str] | Unseen
    """Families whose driver is loaded."""
    pci: tuple[PciCard, ...] | Unseen
    claimed: frozenset[str] | Unseen
    """PCI addresses of all cards that the drivers show, odd ones too."""
    snapshot: Snapshot | Unseen
    nodes: Mapping[tuple[str, int], tuple[str, ...]] | Unseen
    """What is wrong with device nodes, for each card."""
    host_beside: bool | Unseen
    """Whether the host's /sys is mounted where the DaemonSet mounts it."""


async def hardware(situation: Situation) -> Hardware:
    """Probes all of it."""
    root, vendor = situation.host_root, situation.vendor
    sys, dev, beside = await asyncio.gather(
        probe(lambda: directory(root / "sys/class")),
        probe(lambda: directory(root / "dev")),
        probe(lambda: Path("/host/sys/class").is_dir()),
    )
    # Without /sys everything looks like a host without cards, and would be reported as one.
    snapshot: Snapshot | Unseen
    drivers: frozenset[str] | Unseen
    pci: tuple[PciCard, ...] | Unseen
    claimed: frozenset[str] | Unseen
    snapshot = drivers = pci = claimed = Unseen("/sys cannot be read: see that line")
    if not isinstance(sys, Directory) or sys.readable:
        snapshot, drivers, pci, claimed = await asyncio.gather(
            seen(asyncio.wait_for(vendor.snapshot(root), DEADLINE)),
            probe(lambda: _drivers(root, vendor)),
            probe(lambda: _pci(root, vendor)),
            probe(lambda: vendor.addresses(root)),
        )
    cards = [state.card for state in snapshot.cards] if isinstance(snapshot, Snapshot) else []
    return Hardware(
        sys=sys,
        dev=dev,
        drivers=drivers,
        pci=pci,
        claimed=claimed,
        snapshot=snapshot,
        nodes=await probe(lambda: {c.key: tuple(_bad_nodes(root, c)) for c in cards}),
        host_beside=beside,
    )


def _drivers(root: Path, vendor: Vendor) -> frozenset[str]:
    return frozenset(one.family for one in vendor.drivers if (root / one.directory).is_dir())


def _pci(root: Path, vendor: Vendor) -> tuple[PciCard, ...]:
    bus = root / "sys/bus/pci/devices"
    found = []
    for address in sorted(os.listdir(bus) if bus.is_dir() else ()):  # noqa: PTH208 (names)
        if _id(bus / address / "vendor") == vendor.pci:
            link = bus / address / "driver"
            driver = link.readlink().name if link.is_symlink() else None
            device = _id(bus / address / "device")
            found.append(PciCard(address=address, device=device, driver=driver))
    return tuple(found)


def _id(path: Path) -> str:
    """``1a2b``; sysfs writes ``0x1a2b``."""
    raw = content(path, 64) or b""
    return raw.decode(errors="replace").strip().lower().removeprefix("0x")


def _bad_nodes(root: Path, card: Card) -> Iterator[str]:
    """Never opened: opening a node takes the core."""
    for node in card.access.nodes():
        try:
            if not is_device(root / "dev" / node, root):
                yield f"/dev/{node} is no character device"
        except FileNotFoundError:
            yield f"/dev/{node} is missing"
        except OSError as error:
            yield f"/dev/{node} ({error.strerror})"


def offered(situation: Situation, resource: Resource, snapshot: Snapshot) -> tuple[Device, ...]:
    """The devices of a resource that this hardware has, computed as the agent does it."""
    return advertise(snapshot, resource, disabled_for(situation.config, situation.node_name))


def checks(situation: Situation, found: Hardware) -> Iterator[Check]:
    """What it means."""
    if situation.in_pod and situation.host_root == Path("/") and found.host_beside is True:
        yield line("host root", _of_root)
    yield line("/sys", _mounted, "/sys", situation, found.sys)
    yield line("/dev", _mounted, "/dev", situation, found.dev)
    for driver in situation.vendor.drivers:
        yield line(f"driver {driver.family}", _of_driver, driver, found)
    yield line("PCI", _of_pci, situation.vendor, found)
    yield line("cards", _of_cards, found.snapshot)
    if isinstance(found.snapshot, Snapshot):
        for state in found.snapshot.cards:
            yield line(f"card {state.card.name}", _of_card, situation, state, found.nodes)
        for odd in found.snapshot.odd:
            yield line(f"odd {Path(odd.entry).name}", _of_oddity, odd)


def _of_root() -> Finding:
    return wrong(
        "this is the container's own /, and not the host's", "npu-agent doctor --host-root=/host"
    )


def _mounted(name: str, situation: Situation, probed: Directory | Unseen) -> Finding:
    path, found = situation.host_root / name.strip("/"), have(probed)
    if not found.there:
        return wrong(
            f"{found.path} is missing",
            f"mount the host's {name} at {path} (hostPath, readOnly), and name the directory "
            "above it by --host-root",
        )
    if not found.readable:
        raise Unseen(
            f"{found.path} ({found.owner}) cannot be read by uid {situation.uid}",
            TroubleKind.DENIED,
        )
    return ok(f"{path} can be read")


def _of_driver(driver: Driver, found: Hardware) -> Finding:
    if driver.family in have(found.drivers):
        return ok(f"loaded: /{driver.directory}")
    return unused(f"not loaded (no /{driver.directory}); only a {driver.title} needs it")


def _of_cards(snapshot: Snapshot | Unseen) -> Finding:
    if isinstance(snapshot, Unseen):
        return snapshot.finding._replace(remedy="dmesg: a driver may hang")
    cards = snapshot.cards
    if not cards:
        return note("none: the agent serves nothing, and waits for some")
    names = ", ".join(f"{state.card.name} ({state.card.product})" for state in cards)
    return ok(f"{len(cards)}: {names}")


def _of_pci(vendor: Vendor, found: Hardware) -> Finding:
    """Whether the driver shows every card on the bus."""
    if not (cards := have(found.pci)):
        return ok(f"no {vendor.name} device (vendor {vendor.pci}) on the bus")
    lost = [card for card in cards if card.address not in have(found.claimed)]
    given_away = [card for card in lost if card.driver and card.driver.startswith(_HANDED_ON)]
    unbound = [card for card in lost if card.driver is None]
    silent = [card for card in lost if card not in given_away and card not in unbound]

    def names(cards: list[PciCard]) -> str:
        return ", ".join(f"{card.address} ({vendor.pci}:{card.device})" for card in cards)

    if unbound:
        return wrong(
            f"no driver is bound to {names(unbound)}",
            "install and load the vendor's driver for this kernel, and read dmesg; one that "
            "was drained on purpose: echo ADDRESS > /sys/bus/pci/drivers_probe",
        )
    if silent:
        return wrong(
            f"{names(silent)} has a driver ({silent[0].driver}), which shows no card of that "
            "address in /sys/class",
            "dmesg: why did the driver give up on it? Then reload it",
        )
    count = f"{len(cards)} {vendor.name} device{'s' * (len(cards) > 1)}"
    if given_away:
        driver = given_away[0].driver
        return note(f"{count}; {names(given_away)} is handed on by {driver}, so not served here")
    return ok(f"{count} on the bus")


def _of_card(
    situation: Situation,
    state: CardState,
    nodes: Mapping[tuple[str, int], tuple[str, ...]] | Unseen,
) -> Finding:
    card, health = state.card, state.health
    if health.state is Health.UNHEALTHY:
        return wrong(
            f"unhealthy: {health.reason}",
            "it is not handed out until it has recovered: dmesg, then drain it, reload its driver "
            "or power-cycle the host",
        )
    if bad := have(nodes).get(card.key, ()):
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        return wrong(
            f"{', '.join(bad[:3])}{more}",
            "the driver and udev make its nodes: reload the driver; in a container, mount the "
            "host's /dev",
        )
    disabled = disabled_for(situation.config, situation.node_name)
    names = {text.lower() for text in (card.name, card.uuid, card.pci_bus_id, state.id) if text}
    if names & {text.lower() for text in disabled}:
        return note("not handed out: the config's disabledDevices names it")
    count = len(card.access.nodes())
    return ok(f"{health.state.value} ({health.reason}); {count} device nodes; {state.id}")


def _of_oddity(odd: Oddity) -> Finding:
    if odd.unread:
        return wrong(
            f"{odd.entry}: {odd.reason}",
            "it may be a card, and cannot be read: dmesg, then reload its driver",
        )
    return note(
        f"{odd.entry} is not served: {odd.reason}",
        "" if odd.sample_of else "a card newer than this npu-agent? Then take a newer one",
    )
