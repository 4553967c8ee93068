"""Reads the machine's vendor and name, as the firmware has them."""

from __future__ import annotations

from pathlib import Path

from npu_agent.outputs.labels.compute import NAME_FILE, VENDOR_FILE, Machine

_LONGEST = 256
"""Bytes. DMI texts are a few words; a label has room for 63 characters of them."""


def read_machine(host_root: Path) -> Machine:
    """The machine's vendor and name from /sys/class/dmi/id below `host_root`; may block.

    What is absent or cannot be read is None; bytes that are not UTF-8 become U+FFFD.
    """
    return Machine(
        vendor=_text(host_root / VENDOR_FILE.lstrip("/")),
        name=_text(host_root / NAME_FILE.lstrip("/")),
    )


def _text(path: Path) -> str | None:
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read(_LONGEST) or b"").decode(errors="replace")
    except OSError:
        return None
