"""What makes jobs fail or slow on a host, though its cards are well: notes, no faults."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from npu_agent.core.hardware import Card
from npu_agent.files import SIMULATION, content
from npu_agent.people import iouring
from npu_agent.people.doctor.check import SUDO, Check, Context, Lines, Unknown, note, ok, unused
from npu_agent.text import listed

_HUGE_PAGES = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
_CAPABILITIES = 0x100
"""Where a PCI configuration has extended capabilities; any user may read the 64 bytes before."""
_ACS = 0x000D
"""The extended capability Access Control Services; its control word is 6 bytes into it."""
_REDIRECTS = 0b1100
"""Of that word: requests, and completions, from peer to peer go up to the root complex."""


async def lines(context: Context, cards: Iterable[Card]) -> Lines:
    """The lines on a host with these cards; none if no family needs them."""
    profile = context.vendor.profile
    mine = [card for card in cards if card.family in profile.io_uring]
    if mine:
        root = context.host_root
        yield "io_uring", context.in_thread(lambda: _io_uring(root))
        yield "huge pages", context.in_thread(lambda: _huge_pages(root, profile.huge_pages))
        yield "ACS", context.in_thread(lambda: _acs(root, mine))


def _io_uring(root: Path) -> Check:
    """In a container /proc/sys is the host's: no container has a sysctl of this name of its own."""
    if not (root / "proc/sys").is_dir():
        if (root / SIMULATION).is_dir():
            return unused("a simulated host has no kernel of its own")
        root = Path("/")
    if off := iouring.switched_off(root):
        who = "no process" if off == 2 else "only CAP_SYS_ADMIN and kernel.io_uring_group"
        return note(f"{iouring.SYSCTL} is {off}: {who} may use it", iouring.SWITCHED_ON)
    return ok(f"{iouring.SYSCTL} is 0; `npu-agent verify` in a Pod tries the Pod's own profile")


def _huge_pages(root: Path, most: int) -> Check:
    raw = (content(root / _HUGE_PAGES, 32) or b"").strip()
    if not raw.isdigit():
        return unused("this kernel has none of 2 MiB")
    detail = f"{int(raw)} of 2 MiB; the vendor's tuning page has {most} ({most >> 9} GiB of memory)"
    if int(raw) >= most:
        return ok(detail)
    return note(detail, f"vm.nr_hugepages = {most} in /etc/sysctl.d, if the jobs use them")


def _acs(root: Path, cards: Iterable[Card]) -> Check:
    redirecting = []
    # Below the root port: on each switch the upstream port, then the downstream ports.
    ports = sorted({port for card in cards for port in card.switches[2:]})
    for port in ports:
        config = content(root / "sys/bus/pci/devices" / port / "config", 4096) or b""
        if len(config) <= _CAPABILITIES:
            raise Unknown(f"{port}: only root reads all of a switch's configuration", SUDO)
        if _control(config) & _REDIRECTS:
            redirecting.append(port)
    if redirecting:
        return note(
            f"{listed(redirecting)}: transfers between cards make a detour by the root complex",
            "where no virtual machine has a card, at each boot for each of them: "
            f"setpci -s {redirecting[0]} ECAP_ACS+0x6.w=0000",
        )
    if not ports:
        return unused("no card is below a PCIe switch")
    return ok(f"{len(ports)} switch ports send transfers between cards straight on")


def _control(config: bytes) -> int:
    """The control word of ACS; 0 where there is no such capability."""
    at = _CAPABILITIES
    for _ in range(len(config) // 8):  # a broken one may lead in a circle
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20 or len(config)  # 0 is the last one's
    return 0
