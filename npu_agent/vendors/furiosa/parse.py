"""Parsers of what drivers write: text in, values out, no I/O.

Formats: docs/dev/hardware.md. A driver may answer nothing, half a line, or random bytes: what does
not fit is left out, and nothing here raises.
"""

from __future__ import annotations

import re

from npu_agent.text import quoted_json

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,49}")
_PCI = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_DEV = re.compile(r"[0-9]{1,7}:[0-9]{1,7}")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_HEX = re.compile(r"(?:0[xX])?[0-9a-fA-F]{1,16}")
_LONGEST_TEXT = 256
_MOST_NUMBERS = 256
"""Drivers write about twenty lines."""
_UNSIGNED_32 = 1 << 32
_UNSIGNED_64 = 1 << 64
_HEX_LINE = re.compile(
    r"^(\w+)[ \t]*:[ \t]*(?:0[xX])?([0-9a-fA-F]{1,16})[ \t\r]*$", re.ASCII | re.MULTILINE
)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s(?: PCIe)?")
_AER_TOTAL = re.compile(rb"^TOTAL_ERR_[A-Z]+ ([0-9]{1,19})$", re.MULTILINE)
_PER_CORE = re.compile(r"(?:.*:)?\s*([0-9]{1,20})\s*")
_REASONS = (
    "idle",
    "thermal_slowdown",
    "app_power_cap",
    "app_clock_cap",
    "hw_clock_cap",
    "hw_bus_limit",
    "hw_power_cap",
    "other_reason",
)
"""The bits of `throttle` as the vendor's header names them, the lowest first."""


def text(raw: bytes | None) -> str | None:
    """Returns one printable line, stripped; None where there is none or it is not printable."""
    if raw is None or len(raw) > _LONGEST_TEXT:
        return None
    try:
        line = raw.decode().strip()
    except UnicodeDecodeError:
        return None
    return line if line.isprintable() and line else None


def identifier(raw: bytes | None) -> str | None:
    """A text that can be (part of) a device ID: at most 50 of letters, digits and ``._:-``.

    50, because the kubelet takes 63 and ``_cores_0-3`` is added to some.
    """
    return _of_form(_IDENTIFIER, raw)


def pci_address(raw: bytes | None) -> str | None:
    """A PCI address with domain in lower case, as /sys/bus/pci/devices writes it."""
    address = _of_form(_PCI, raw)
    return address and address.lower()


def device_number(raw: bytes | None) -> str | None:
    """``major:minor`` of a character device."""
    return _of_form(_DEV, raw)


def _of_form(form: re.Pattern[str], raw: bytes | None) -> str | None:
    word = text(raw)
    return word if word and form.fullmatch(word) else None


def integer(raw: bytes | None) -> int | None:
    """A decimal integer that fits 64 bits, signed or unsigned."""
    digits = _of_form(_INTEGER, raw)
    if digits is None:
        return None
    value = int(digits)
    return value if -_UNSIGNED_64 // 2 <= value < _UNSIGNED_64 else None


def numa_node(raw: bytes | None) -> int | None:
    """A NUMA node; the kernel's -1 means that there is none."""
    node = integer(raw)
    return node if node is not None and 0 <= node < 1 << 16 else None


def link_speed(raw: bytes | None) -> float | None:
    """GT/s of a PCIe link: ``32.0 GT/s PCIe``, of older kernels ``8 GT/s``; else ``Unknown``."""
    speed = _SPEED.fullmatch(text(raw) or "")
    return float(speed[1]) if speed else None


def aer_total(raw: bytes | None) -> int | None:
    """How many errors the kernel has counted: the line ``TOTAL_ERR_FATAL 0`` of ``aer_dev_fatal``.

    Format: Linux, Documentation/ABI/testing/sysfs-bus-pci-devices-aer.
    """
    total = _AER_TOTAL.search(raw or b"")
    return int(total[1]) if total else None


def numbers(raw: bytes | None) -> tuple[tuple[str, int], ...]:
    """Lines of ``Name: 12`` or ``Name: 0xAB``, names as written, first of each name, in order.

    Names are ASCII; the numbers are unsigned and fit 64 bits.
    """
    by_name: dict[str, int] = {}
    for line in (raw or b"").decode("ascii", "replace").splitlines()[:_MOST_NUMBERS]:
        name, colon, value = line.rpartition(":")
        name = name.strip()
        value = value.strip()
        if not colon or not name or len(name) > _LONGEST_TEXT:
            continue
        if not name.isascii() or not name.isprintable():
            continue
        if _INTEGER.fullmatch(value):
            number = int(value)
        elif value[:2].lower() == "0x" and _HEX.fullmatch(value):
            number = int(value, 16)
        else:
            continue
        if 0 <= number < _UNSIGNED_64:
            by_name.setdefault(name, number)
    return tuple(by_name.items())


def normalised(name: str) -> str:
    """``AXI Post Error`` -> ``axi_post_error``."""
    return "_".join(re.findall(r"[a-z0-9]+", name.lower()))


def errors(raw: bytes | None) -> tuple[tuple[str, int], ...]:
    """Error counters of ``atr_error`` by normalised name.

    The "Doorbell done" lines count completions, not failures, and are left out.
    """
    counters: dict[str, int] = {}
    for name, value in numbers(raw):
        key = normalised(name)
        if key and not key.endswith("_doorbell_done"):
            counters.setdefault(key, value)
    return tuple(counters.items())


def per_core(raw: bytes | None, cores: int) -> tuple[int | None, ...]:
    """Parses a line a core, in order: ``1``, or a number after a name: ``pe0 (MHz): 1000``.

    Lines are identified by their place alone, so a file with more or fewer lines than `cores` tells
    nothing: an empty tuple. None stands for a line without a number.
    """
    lines = (raw or b"").decode("ascii", "replace").splitlines()
    if len(lines) != cores:
        return ()
    return tuple(int(match[1]) if (match := _PER_CORE.fullmatch(line)) else None for line in lines)


def perf_regs(raw: bytes) -> tuple[int, int] | None:
    """``(cycles, task cycles)`` of a Warboy's core; None unless all three registers are there.

    The cycle count is in two registers of 32 bits, the task cycles (``TaskExecutionTime``) in one:
    they start again from 0 after 2**32 - 1. All ones in every register of the cycle count is
    what is read of a card that fell off the bus, and no count.
    """
    registers = _hex(raw)
    names = ("CycleCountHigh", "CycleCount", "TaskExecutionTime")
    high, low, task_cycles = (registers.get(name, _UNSIGNED_64) for name in names)
    if max(high, low, task_cycles) >= _UNSIGNED_32 or high == low == _UNSIGNED_32 - 1:
        return None
    return high << 32 | low, task_cycles


def metrics(raw: bytes) -> tuple[int, int] | None:
    """``(cycles, task cycles)`` of an RNGD's core; None unless both are there."""
    return _two(raw, "CycleCount", "TaskCycleCount")


def alloc_status(raw: bytes) -> tuple[int, int] | None:
    """``(bytes that may be taken, bytes taken)`` of an RNGD's core in use.

    A core in use may have all zeros for hours: a capacity of 0 does not count.
    """
    capacity_usage = _two(raw, "dram_capacity", "dram_usage")
    return capacity_usage if capacity_usage and capacity_usage[0] else None


def _two(raw: bytes, whole: str, part: str) -> tuple[int, int] | None:
    by_name = _hex(raw)
    if whole not in by_name or part not in by_name or by_name[whole] == _UNSIGNED_64 - 1:
        return None
    return by_name[whole], by_name[part]


def _hex(raw: bytes) -> dict[str, int]:
    """Lines of ``Name: 0xAB``, the first of each name."""
    lines = _HEX_LINE.findall(raw.decode("ascii", "replace"))
    return {name: int(value, 16) for name, value in reversed(lines)}


def throttle(raw: bytes | None) -> tuple[str, ...] | None:
    """The reasons in a mask of 32 bits (``0x00000004``); None: it is none."""
    said = text(raw)
    if said is None or len(said) > 10 or not _HEX.fullmatch(said):
        return None
    mask = int(said, 16)
    if mask == 0xFFFF_FFFF:  # what is read of a card that fell off the bus
        return None
    reasons = dict(enumerate(_REASONS))
    return tuple(reasons.get(bit, f"bit_{bit}") for bit in range(32) if mask >> bit & 1)


def within(raw: bytes | None, least: int, most: int) -> int | None:
    """An integer that can be true; None otherwise."""
    value = integer(raw)
    return value if value is not None and least <= value <= most else None


def liveness(raw: bytes | None) -> bool | None:
    """``1`` is alive and ``0`` is not; empty or absent is unknown.

    Raises:
        ValueError: it says anything else, which no driver that works does.
    """
    if raw is None or not raw.strip():
        return None
    said = raw.strip()
    if said in (b"0", b"1"):
        return said == b"1"
    if not (said.isascii() and said.decode("ascii").isprintable()):
        raise ValueError(f"neither 0 nor 1 but binary data ({len(said)} bytes)")
    shown = quoted_json(said[:20].decode("ascii"))
    raise ValueError(f"neither 0 nor 1 but {shown}{'...' if len(said) > 20 else ''}")
