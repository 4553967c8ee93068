"""The host's hardware: /sys and /dev, drivers, cards and their device nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent.config import disabled_for
from npu_agent.core.advice import TRENDS, UNREADABLE, advice, plain_reason
from npu_agent.core.hardware import Card, CardState, HealthState, SkippedDevice, Snapshot
from npu_agent.core.offer import names
from npu_agent.core.trends import Trend, TrendKind, at_one_moment
from npu_agent.core.trouble import TroubleKind
from npu_agent.core.vendor import Driver
from npu_agent.files import content, is_device
from npu_agent.inventory.inventory import read_once
from npu_agent.people.doctor.agent import NO_REPORT, report
from npu_agent.people.doctor.check import DRIVER_LOG, Check, Lines, Unknown, note, ok, unused, wrong
from npu_agent.people.doctor.context import Context, os_errors_are_unknown
from npu_agent.people.doctor.directories import Directory, directory
from npu_agent.text import listed

_HANDED_ON = "vfio"


async def lines(context: Context) -> Lines:
    if await context.probe_or(root_not_given, False):
        what = "this is the container's own /, not the host's"
        remedy = "name where the host's / is mounted: --host-root=/host"
        options = (f"--config-file={context.agent_config}", "--host-root=/host")
        yield "host root", wrong(what, remedy, context.command("doctor", *options))
    yield "/sys", _mounted(context, "/sys", "sys/class")
    yield "/dev", _mounted(context, "/dev", "dev")
    for vendor in context.vendors:
        for driver in vendor.profile.drivers:
            yield f"driver {driver.family}", _driver(context, driver)
    yield "PCI", _pci(context)
    yield "cards", _cards(context)
    found = await context.probe(snapshot)
    for state in found.cards:
        yield f"card {state.card.name}", _card(context, state)
    if twins := at_one_moment(found).of(TrendKind.TWINS):
        yield "UUIDs", _twins([*twins.values()])
    for odd in found.skipped:
        yield f"odd {Path(odd.entry).name}", _odd(odd)


async def root_not_given(context: Context) -> bool:
    """Whether the host's / is mounted as in the DaemonSet, and was not named."""
    if not context.in_pod or context.host_root != Path("/"):
        return False
    return await context.in_thread(lambda: Path("/host/sys/class").is_dir())


async def _mounted(context: Context, name: str, below: str) -> Check:
    found = await context.in_thread(lambda: directory(context.host_root / below))
    path = context.host_root / name.strip("/")
    if not found.there:
        return wrong(
            f"{found.path} is missing",
            f"mount the host's {name} at {path} (hostPath, readOnly), and name the directory "
            "above it by --host-root",
            context.apply_again() if context.in_pod else f"ls -ld {path}",
        )
    if not found.readable:
        raise unreadable(context, found)
    return ok(f"{path} can be read")


def unreadable(context: Context, found: Directory) -> Unknown:
    why = f"{found.path} ({found.owner}) cannot be read by uid {context.uid}"
    return Unknown(why, TroubleKind.DENIED)


async def sys_readable(context: Context) -> None:
    """Raises Unknown if /sys cannot be read: the host would seem to have no cards."""
    if not (await context.in_thread(lambda: directory(context.host_root / "sys/class"))).readable:
        raise Unknown("/sys cannot be read: see that line")


async def _driver(context: Context, driver: Driver) -> Check:
    await context.probe(sys_readable)
    if await context.in_thread((context.host_root / driver.directory).is_dir):
        return ok(f"loaded: /{driver.directory}")
    return unused(f"not loaded (no /{driver.directory}); only a {driver.title} needs it")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciCard:
    """A vendor's device on the PCI bus."""

    address: str
    vendor: str
    device: str
    driver: str | None

    def __str__(self) -> str:
        return f"{self.address} ({self.vendor}:{self.device})"


async def _pci(context: Context) -> Check:
    await context.probe(sys_readable)
    titles = {one.profile.pci: one.profile.title for one in context.vendors if one.profile.pci}
    cards = await context.in_thread(lambda: tuple(on_the_bus(context.host_root, titles)))
    if not cards:
        ids = " or ".join(f"{title} device (vendor {id_})" for id_, title in titles.items())
        return ok(f"no {ids} on the bus")
    shown = await context.in_thread(
        lambda: {at for one in context.vendors for at in one.pci_addresses()}
    )
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
            "check dmesg for why the driver gave the card up, then reload the driver",
            DRIVER_LOG,
        )
    makers = " and ".join(sorted({titles[card.vendor] for card in cards}))
    count = f"{len(cards)} {makers} device{'s' * (len(cards) > 1)}"
    if handed_on:
        given = f"{', '.join(map(str, handed_on))} is passed through by {handed_on[0].driver}"
        return note(f"{count}; {given}, so not served here")
    return ok(f"{count} on the bus")


def on_the_bus(root: Path, vendors: Collection[str]) -> Iterator[PciCard]:
    """The devices of these vendors (``1a2b``) on the PCI bus of the host below `root`; blocking."""
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
    raw = content(path, 64) or b""
    return raw.decode(errors="replace").strip().lower().removeprefix("0x")


async def snapshot(context: Context) -> Snapshot:
    await context.probe(sys_readable)
    with os_errors_are_unknown():
        return await asyncio.wait_for(read_once(context.vendors), context.timing.read)


async def any_sign_of_cards(context: Context) -> bool:
    """Whether there is a driver, or a device on the bus."""
    drivers = [each.directory for one in context.vendors for each in one.profile.drivers]
    ids = [one.profile.pci for one in context.vendors if one.profile.pci]
    return await context.in_thread(
        lambda: (
            any((context.host_root / each).is_dir() for each in drivers)
            or any(True for _ in on_the_bus(context.host_root, ids))
        )
    )


async def _cards(context: Context) -> Check:
    try:
        cards = (await context.probe(snapshot)).cards
    except Unknown as missing:
        return replace(missing.check, remedy="check dmesg: a driver may hang")
    if not cards:
        return note("none: the agent serves nothing, and waits for cards")
    listed = ", ".join(f"{state.card.name} ({state.card.product})" for state in cards)
    return ok(f"{len(cards)}: {listed}")


async def _card(context: Context, state: CardState) -> Check:
    card, health = state.card, state.health
    if health.state is HealthState.UNHEALTHY:
        detail = f"unhealthy, and not handed out: {plain_reason(health)}"
        return wrong(detail, advice(health.cause).remedy, advice(health.cause).command)
    if bad := await context.in_thread(lambda: tuple(_bad_nodes(context.host_root, card))):
        return wrong(
            listed(bad, 3),
            "reload the driver, which makes the nodes with udev; in a container, mount the "
            "host's /dev",
            f"ls -l /dev/{card.name}*",
        )
    disabled = disabled_for(context.config, context.node_name)
    if names(state) & {word.lower() for word in disabled}:
        return note("not handed out: the config's disabledDevices names it")
    for problem in (await context.probe_or(report, NO_REPORT)).problems:
        if state.id in problem.cards:
            return note(problem.text, problem.remedy)
    count = len(card.access.nodes())
    return ok(f"{health.state.value} ({health.reason}); {count} device nodes; {state.id}")


def _twins(twins: Sequence[Trend]) -> Check:
    words = TRENDS[TrendKind.TWINS]
    names = ", ".join(one.card.card.name for one in twins)
    return wrong(f"{names} {words.many}: {twins[0].detail}", words.remedy, words.command)


def _bad_nodes(root: Path, card: Card) -> Iterator[str]:
    """Never opened: opening a node takes the core."""
    for node in card.access.nodes():
        try:
            if not is_device(root / "dev" / node, root):
                yield f"/dev/{node} is not a character device"
        except FileNotFoundError:
            yield f"/dev/{node} is missing"
        except OSError as error:
            yield f"/dev/{node} ({error.strerror})"


def _odd(odd: SkippedDevice) -> Check:
    if odd.unread:
        return wrong(f"{odd.entry}: {odd.reason}", UNREADABLE, DRIVER_LOG)
    return note(
        f"{odd.entry} is not served: {odd.reason}",
        "" if odd.sample_of else "install a newer npu-agent if the card is newer",
    )


def has_unread(seen: Snapshot) -> bool:
    return any(odd.unread for odd in seen.skipped)
