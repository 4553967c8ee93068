"""The host's hardware: /sys and /dev, drivers, cards and their device nodes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from npu_agent.core.hardware import SkippedDevice, Snapshot
from npu_agent.core.kinds import Problem
from npu_agent.core.problems import notes
from npu_agent.core.problems.cards import problems
from npu_agent.core.state import Invocation
from npu_agent.files import SIMULATION, content
from npu_agent.inventory.card import ProbeSettings
from npu_agent.kubelet.pods import CGROUPS
from npu_agent.people.cards import as_agent, read_once
from npu_agent.people.doctor import tuning
from npu_agent.people.doctor.agent import reported
from npu_agent.people.doctor.check import (
    SUDO,
    Check,
    Context,
    Lines,
    Unknown,
    note,
    ok,
    os_errors_are_unknown,
    unused,
    wrong,
)
from npu_agent.threads import within
from npu_agent.wording import ENGLISH, commands

_PASSED_THROUGH = "vfio"
_DRIVER_LOG = commands.DMESG


async def lines(context: Context) -> Lines:
    yield "/sys", _mounted(context, "sys/class")
    yield "/dev", _mounted(context, "dev")
    yield "cgroups", _mounted(context, CGROUPS)
    if (await context.in_thread(lambda: look(context.host_root / "sys/class", write=False)))[1]:
        return  # the host would seem to have no cards
    yield "PCI", _pci(context)
    yield "cards", _cards(context)
    hardware = await context.probe(snapshot)
    # A running agent has said it, and knows more than one reading shows.
    if (await context.probe(reported)).report is None:
        state = as_agent(hardware, context.config.health.policy)
        for problem in problems(state):
            yield problem.subject, _problem(context, problem)
        for remark in notes(state):
            yield remark.subject, note(ENGLISH.text(remark), ENGLISH.remedy(remark))
    for odd in hardware.skipped:
        yield f"odd {Path(odd.entry).name}", _odd(odd)
    async for line in tuning.lines(context, (state.card for state in hardware.cards)):
        yield line


async def _mounted(context: Context, below: str) -> Check:
    path = context.host_root / below
    simulated = context.host_root / SIMULATION
    if below == CGROUPS and await context.in_thread(
        lambda: simulated.exists() and not path.exists()
    ):
        return unused("a simulated host has none")
    return await usable(
        context,
        path,
        f"mount the host's /{below} at {path} (hostPath, readOnly), and name the directory above "
        "it by --host-root",
    )


async def usable(context: Context, path: Path, advice: str, *, write: bool = False) -> Check:
    """Whether this process may read a directory, or write to it.

    Raises:
        Unknown: this user may not, and root may.
    """
    command = context.apply_again() if context.in_pod else f"ls -ld {path}"
    owner, fault = await context.in_thread(lambda: look(path, write=write))
    if not fault:
        return ok(f"{path} can be {'written' if write else 'read'}")
    if owner and context.uid and not context.in_pod:
        raise Unknown(f"{path} ({owner}) {fault} by uid {context.uid}", SUDO)
    return wrong(f"{path} {f'({owner}) ' if owner else ''}{fault}", advice, command)


def look(path: Path, *, write: bool) -> tuple[str, str]:
    """Returns the owner of a directory, for people, and why it cannot be used; may block."""
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "", "is missing"
    if not stat.S_ISDIR(info.st_mode):
        return "", "is not a directory"
    if write and os.statvfs(path).f_flag & os.ST_RDONLY:
        return "", "is mounted read-only"
    owner = f"uid {info.st_uid}, gid {info.st_gid}, mode {stat.S_IMODE(info.st_mode):04o}"
    if not os.access(path, (os.W_OK if write else os.R_OK) | os.X_OK, effective_ids=True):
        return owner, f"may not be {'written' if write else 'read'}"
    return owner, ""


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
    profile = context.vendor.profile
    cards = await context.in_thread(lambda: tuple(on_the_bus(context.host_root, profile.pci)))
    if not cards:
        return unused(f"no {profile.title} device (vendor {profile.pci}) on the bus")
    shown = await context.in_thread(context.vendor.pci_addresses)
    lost = [card for card in cards if card.address not in shown]
    unbound = [card for card in lost if card.driver is None]
    passed = [card for card in lost if card.driver and card.driver.startswith(_PASSED_THROUGH)]
    silent = [card for card in lost if card not in unbound and card not in passed]
    if unbound:
        return wrong(
            f"no driver is bound to {', '.join(map(str, unbound))}",
            "install and load the vendor's driver for this kernel, and read dmesg; one that "
            "was drained on purpose: echo ADDRESS > /sys/bus/pci/drivers_probe",
            _DRIVER_LOG,
        )
    if silent:
        return wrong(
            f"{', '.join(map(str, silent))} has a driver ({silent[0].driver}), which shows no card "
            "of that address in /sys/class",
            "check dmesg for why the driver gave the card up, then reload the driver",
            _DRIVER_LOG,
        )
    devices = "devices" if len(cards) > 1 else "device"
    count = f"{len(cards)} {profile.title} {devices}"

    if passed:
        given = f"{', '.join(map(str, passed))} is passed through by {passed[0].driver}"
        return note(f"{count}; {given}, so not served here")
    return ok(f"{count} on the bus, each with a driver")


def on_the_bus(root: Path, vendor: str) -> Iterator[PciCard]:
    """The devices of this vendor (``1a2b``) on the PCI bus of the host below `root`; blocking."""
    bus = root / "sys/bus/pci/devices"
    for address in sorted(os.listdir(bus) if bus.is_dir() else ()):  # noqa: PTH208 (names)
        maker = _id(bus / address / "vendor")
        # A virtual function is no card, and may well have no driver here.
        if maker == vendor and not (bus / address / "physfn").exists():
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
    settings = ProbeSettings(policy=context.config.health.policy)
    with os_errors_are_unknown():
        async with within(context.timing.read):
            return await read_once(context.vendor, settings=settings)


async def _cards(context: Context) -> Check:
    try:
        cards = (await context.probe(snapshot)).cards
    except Unknown as missing:
        return replace(missing.check, remedy="check dmesg: a driver may hang")
    if not cards:
        return note(
            "none: the agent serves nothing, and waits for cards",
            "on a host without NPUs, run npu-agent demo to see the agent at work",
        )
    names = ", ".join(f"{state.card.name} ({state.card.product})" for state in cards)
    return ok(f"{len(cards)}: {names}")


def _problem(context: Context, problem: Problem) -> Check:
    text = ENGLISH.text(problem)
    if problem.of_host and not context.node_name:
        # There is no Node to cordon.
        problem = replace(problem, kind="CardUnhealthy")
    command = commands.first(problem, Invocation(), context.node_name)
    return wrong(text, ENGLISH.remedy(problem), command)


def _odd(odd: SkippedDevice) -> Check:
    if odd.unread:
        advice = ENGLISH.remedy(Problem("EntryUnreadable"))
        return wrong(f"{odd.entry}: {odd.reason}", advice, _DRIVER_LOG)
    return note(
        f"{odd.entry} is not served: {odd.reason}",
        "" if odd.sample_of else "install a newer npu-agent if the card is newer",
    )
