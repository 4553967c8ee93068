"""The host's hardware: /sys and /dev, drivers, cards and their device nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_agent.config import disabled_for
from npu_agent.config.resources import asks_for, offered_by, resources_of
from npu_agent.core.api_mode import WantedApi
from npu_agent.core.hardware import Card, CardState, SkippedDevice, Snapshot
from npu_agent.core.hardware import HealthState as Health
from npu_agent.core.offer import Device, Resource, advertise, names
from npu_agent.core.trouble import TroubleKind
from npu_agent.core.vendor import Driver
from npu_agent.core.vendor_spec import merged
from npu_agent.doctor.check import DRIVER_LOG, Finding, Lines, Unseen, note, ok, unused, wrong
from npu_agent.doctor.probe import DEADLINE, directory, probe, unseen
from npu_agent.doctor.situation import Situation
from npu_agent.files import content, is_device
from npu_agent.inventory.inventory import read_once
from npu_agent.kube import Api, ApiError
from npu_agent.outputs.dra.support import Support, support

_HANDED_ON = "vfio"
"""How drivers begin that hand a card to a virtual machine."""


async def lines(here: Situation) -> Lines:
    """Of this subject."""
    if await here.see_or(root_forgotten, False):
        what = "this is the container's own /, and not the host's"
        remedy = "name where the host's / is mounted: --host-root=/host"
        options = (f"--config-file={here.agent_config}", "--host-root=/host")
        yield "host root", wrong(what, remedy, here.command("doctor", *options))
    yield "/sys", _mounted(here, "/sys", "sys/class")
    yield "/dev", _mounted(here, "/dev", "dev")
    for vendor in here.vendors:
        for driver in vendor.profile.drivers:
            yield f"driver {driver.family}", _driver(here, driver)
    yield "PCI", _pci(here)
    yield "cards", _cards(here)
    found = await here.see(snapshot)
    for state in found.cards:
        yield f"card {state.card.name}", _card(here, state)
    for odd in found.skipped:
        yield f"odd {Path(odd.entry).name}", _oddity(odd)


async def root_forgotten(here: Situation) -> bool:
    """Whether this is a container's / while the host's is mounted as the DaemonSet does it."""
    if not here.in_pod or here.host_root != Path("/"):
        return False
    return await probe(lambda: Path("/host/sys/class").is_dir())


async def _mounted(here: Situation, name: str, below: str) -> Finding:
    found = await probe(lambda: directory(here.host_root / below))
    path = here.host_root / name.strip("/")
    if not found.there:
        return wrong(
            f"{found.path} is missing",
            f"mount the host's {name} at {path} (hostPath, readOnly), and name the directory "
            "above it by --host-root",
            here.apply_again() if here.in_pod else f"ls -ld {path}",
        )
    if not found.readable:
        raise Unseen(
            f"{found.path} ({found.owner}) cannot be read by uid {here.uid}",
            TroubleKind.DENIED,
        )
    return ok(f"{path} can be read")


async def sys_readable(here: Situation) -> None:
    """Without /sys everything looks like a host without cards, and would be reported as one."""
    if not (await probe(lambda: directory(here.host_root / "sys/class"))).readable:
        raise Unseen("/sys cannot be read: see that line")


async def _driver(here: Situation, driver: Driver) -> Finding:
    await here.see(sys_readable)
    if await probe((here.host_root / driver.directory).is_dir):
        return ok(f"loaded: /{driver.directory}")
    return unused(f"not loaded (no /{driver.directory}); only a {driver.title} needs it")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciCard:
    """A vendor's device on the PCI bus."""

    address: str
    vendor: str
    """``1a2b``."""
    device: str
    """``0000``."""
    driver: str | None
    """None: none is bound to it."""

    def __str__(self) -> str:
        return f"{self.address} ({self.vendor}:{self.device})"


async def _pci(here: Situation) -> Finding:
    """Whether the drivers show every card on the bus."""
    await here.see(sys_readable)
    titles = {one.profile.pci: one.profile.title for one in here.vendors if one.profile.pci}
    cards = await probe(lambda: tuple(_on_the_bus(here.host_root, titles)))
    if not cards:
        ids = " or ".join(f"{title} device (vendor {id_})" for id_, title in titles.items())
        return ok(f"no {ids} on the bus")
    shown = await probe(lambda: {at for one in here.vendors for at in one.pci_addresses()})
    lost = [card for card in cards if card.address not in shown]
    unbound = [card for card in lost if card.driver is None]
    handed_on = [card for card in lost if card.driver and card.driver.startswith(_HANDED_ON)]
    silent = [card for card in lost if card not in unbound and card not in handed_on]
    if unbound:
        return wrong(
            f"no driver is bound to {', '.join(map(str, unbound))}",
            "install and load the vendor's driver for this kernel, and read dmesg; one that "
            "was drained on purpose: echo ADDRESS > /sys/bus/pci/drivers_probe",
            DRIVER_LOG,
        )
    if silent:
        return wrong(
            f"{', '.join(map(str, silent))} has a driver ({silent[0].driver}), which shows no card "
            "of that address in /sys/class",
            "read in dmesg why the driver gave up on it, then reload the driver",
            DRIVER_LOG,
        )
    makers = " and ".join(sorted({titles[card.vendor] for card in cards}))
    count = f"{len(cards)} {makers} device{'s' * (len(cards) > 1)}"
    if handed_on:
        given = f"{', '.join(map(str, handed_on))} is handed on by {handed_on[0].driver}"
        return note(f"{count}; {given}, so not served here")
    return ok(f"{count} on the bus")


def _on_the_bus(root: Path, vendors: Collection[str]) -> Iterator[PciCard]:
    bus = root / "sys/bus/pci/devices"
    for address in sorted(os.listdir(bus) if bus.is_dir() else ()):  # noqa: PTH208 (names)
        vendor = _id(bus / address / "vendor")
        if vendor in vendors:
            link = bus / address / "driver"
            yield PciCard(
                address=address,
                vendor=vendor,
                device=_id(bus / address / "device"),
                driver=link.readlink().name if link.is_symlink() else None,
            )


def _id(path: Path) -> str:
    """``1a2b``; sysfs writes ``0x1a2b``."""
    raw = content(path, 64) or b""
    return raw.decode(errors="replace").strip().lower().removeprefix("0x")


async def snapshot(here: Situation) -> Snapshot:
    """The cards, each read once."""
    await here.see(sys_readable)
    with unseen():
        return await asyncio.wait_for(read_once(here.vendors), DEADLINE)


async def any_sign_of_cards(here: Situation) -> bool:
    """Whether there is a driver, which every card that can be seen has, or a device on the bus."""
    drivers = [each.directory for one in here.vendors for each in one.profile.drivers]
    ids = [one.profile.pci for one in here.vendors if one.profile.pci]
    return await probe(
        lambda: (
            any((here.host_root / each).is_dir() for each in drivers)
            or any(True for _ in _on_the_bus(here.host_root, ids))
        )
    )


async def _cards(here: Situation) -> Finding:
    try:
        cards = (await here.see(snapshot)).cards
    except Unseen as missing:
        return missing.finding._replace(remedy="read dmesg: a driver may hang")
    if not cards:
        return note("none: the agent serves nothing, and waits for some")
    listed = ", ".join(f"{state.card.name} ({state.card.product})" for state in cards)
    return ok(f"{len(cards)}: {listed}")


async def _card(here: Situation, state: CardState) -> Finding:
    card, health = state.card, state.health
    if health.state is Health.UNHEALTHY:
        return wrong(
            f"unhealthy: {health.reason}",
            "it is not handed out until it has recovered: read dmesg, then drain it, reload its "
            "driver or power-cycle the host",
            DRIVER_LOG,
        )
    if bad := await probe(lambda: tuple(_bad_nodes(here.host_root, card))):
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        return wrong(
            f"{', '.join(bad[:3])}{more}",
            "the driver and udev make its nodes: reload the driver; in a container, mount the "
            "host's /dev",
            f"ls -l /dev/{card.name}*",
        )
    disabled = disabled_for(here.config, here.node_name)
    if names(state) & {word.lower() for word in disabled}:
        return note("not handed out: the config's disabledDevices names it")
    count = len(card.access.nodes())
    return ok(f"{health.state.value} ({health.reason}); {count} device nodes; {state.id}")


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


def _oddity(odd: SkippedDevice) -> Finding:
    if odd.unread:
        return wrong(
            f"{odd.entry}: {odd.reason}",
            "it may be a card, and cannot be read: read dmesg, then reload its driver",
            DRIVER_LOG,
        )
    return note(
        f"{odd.entry} is not served: {odd.reason}",
        "" if odd.sample_of else "if this is a card newer than npu-agent, install a newer one",
    )


def doubtful(seen: Snapshot) -> bool:
    """Whether there may be cards that could not be read."""
    return any(odd.unread for odd in seen.skipped)


async def dra_support(here: Situation) -> Support:
    """Whether this node can do DRA.

    Raises:
        Unseen: the API server does not say.
    """
    if here.node_name is None:
        raise Unseen("NODE_NAME is not set")
    api = Api(deadline=DEADLINE)
    try:
        return await support(api, here.node_name)
    except ApiError as error:
        raise Unseen(f"the API server does not say: {error.what}") from error
    finally:
        await api.close()


def may_use_dra(here: Situation) -> bool:
    """Whether the configuration lets this node offer cards by DRA."""
    config, node = here.config, here.node_name
    return asks_for(config, "dra", node) or asks_for(config, "auto", node)


async def by_claims(here: Situation) -> bool:
    """Whether cards are offered by DRA here, as far as is known."""
    if asks_for(here.config, "dra", here.node_name):
        return True
    auto = asks_for(here.config, "auto", here.node_name)
    found = await here.see_or(dra_support, None) if auto else None
    return found is not None and found.available


async def by_device_plugin(here: Situation) -> tuple[Resource, ...]:
    """Of the resources of the configuration, those that the device plugin serves here."""
    available: bool | None = False
    if asks_for(here.config, "auto", here.node_name):
        found = await here.see_or(dra_support, None)
        available = found.available if found else None
    counts = merged([vendor.spec for vendor in here.vendors]).core_counts
    families = offered_by(here.config, counts, WantedApi.PLUGIN, here.node_name, auto=available)
    return tuple(one for one in resources_of(here.config, counts, families) if one.widths)


def offered(here: Situation, resource: Resource, snapshot: Snapshot) -> tuple[Device, ...]:
    """The devices of a resource that this hardware has, computed as the agent does it."""
    return advertise(snapshot, resource, disabled_for(here.config, here.node_name))
