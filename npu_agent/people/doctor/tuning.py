"""What makes jobs fail or slow on a host, though its cards are well: notes, no faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from npu_agent.core.hardware import Card
from npu_agent.core.vendor import Profile
from npu_agent.files import SIMULATION, content
from npu_agent.people import iouring
from npu_agent.people.doctor.check import SUDO, Check, Context, Lines, Unknown, note, ok, unused
from npu_agent.text import listed

_HUGE_PAGES = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
_CONFIG = 4096
"""Bytes of a PCI Express function's configuration; of them 64 may be read by any user."""
_CAPABILITIES = 0x100
_ACS = 0x000D
"""The extended capability Access Control Services; its control word is 6 bytes into it."""
_REDIRECTS = 0b1100
"""Of that word: requests, and completions, from peer to peer go up to the root complex."""


async def lines(context: Context, profile: Profile, cards: Iterable[Card]) -> Lines:
    """The lines on a host with these cards, of one vendor; none if no family needs them."""
    mine = [card for card in cards if card.family in profile.io_uring]
    if mine:
        yield "io_uring", _io_uring(context)
        yield "huge pages", _huge_pages(context, profile.huge_pages)
        yield "ACS", _acs(context, mine)


async def _io_uring(context: Context) -> Check:
    root = await context.in_thread(lambda: _proc(context.host_root))
    if root is None:
        return unused("a simulated host has no kernel of its own")
    off = await context.in_thread(lambda: iouring.switched_off(root))
    if not off:
        return ok(f"{iouring.SYSCTL} is 0; `npu-agent verify` in a Pod tries the Pod's own profile")
    who = "no process" if off == 2 else "no process without CAP_SYS_ADMIN or kernel.io_uring_group"
    return note(f"{iouring.SYSCTL} is {off}: {who} may use it", iouring.SWITCHED_ON)


def _proc(host_root: Path) -> Path | None:
    """Where the kernel's /proc/sys is, which no container has of its own."""
    if (host_root / "proc/sys").is_dir():
        return host_root
    return None if (host_root / SIMULATION).is_dir() else Path("/")


async def _huge_pages(context: Context, most: int) -> Check:
    raw = await context.in_thread(lambda: content(context.host_root / _HUGE_PAGES, 32))
    if raw is None or not raw.strip().isdigit():
        return unused("this kernel has none of 2 MiB")
    detail = f"{int(raw)} of 2 MiB; the vendor's tuning page has {most} ({most >> 9} GiB of memory)"
    if int(raw) >= most:
        return ok(detail)
    return note(detail, f"vm.nr_hugepages = {most} in /etc/sysctl.d, if the jobs use them")


async def _acs(context: Context, cards: Iterable[Card]) -> Check:
    # Below the root port: on each switch the upstream port, then the downstream ports.
    ports = sorted({port for card in cards for port in card.switches[2:]})
    if not ports:
        return unused("no card is below a PCIe switch")
    configs = await context.in_thread(
        lambda: {port: _config(context.host_root, port) for port in ports}
    )
    if hidden := [port for port, config in configs.items() if len(config) <= _CAPABILITIES]:
        raise Unknown(f"{listed(hidden)}: only root reads all of a switch's configuration", SUDO)
    redirecting = [port for port, config in configs.items() if _control(config) & _REDIRECTS]
    if not redirecting:
        return ok(f"{len(ports)} switch ports send transfers between cards straight on")
    return note(
        f"{listed(redirecting)}: transfers between cards make a detour by the root complex",
        "where no virtual machine has a card, at each boot for each of them: "
        f"setpci -s {redirecting[0]} ECAP_ACS+0x6.w=0000",
    )


def _config(host_root: Path, port: str) -> bytes:
    return content(host_root / "sys/bus/pci/devices" / port / "config", _CONFIG) or b""


def _control(config: bytes) -> int:
    """The control word of ACS; 0 where there is no such capability."""
    return next((int.from_bytes(config[at + 6 : at + 8], "little") for at in _found(config)), 0)


def _found(config: bytes) -> Iterator[int]:
    """Where ACS is in a configuration: each extended capability has the offset of the next."""
    at = _CAPABILITIES
    for _ in range(len(config) // 8):  # a broken one may lead in a circle
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            yield at
        at = header >> 20
        if at < _CAPABILITIES:
            return
