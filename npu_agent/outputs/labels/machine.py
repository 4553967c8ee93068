"""Reads the machine's vendor and name, as the firmware has them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from npu_agent import files
from npu_agent.logs import logger
from npu_agent.outputs.labels.compute import NAME_FILE, VENDOR_FILE, Machine

log = logger(__name__)

_LONGEST = 256
"""Bytes. DMI texts are a few words; a label has room for 63 characters of them."""
_DEADLINE = 2.0


async def read_machine(host_root: Path) -> Machine:
    """The machine's vendor and name from /sys/class/dmi/id below `host_root`.

    What is absent or cannot be read is None; bytes that are not UTF-8 become U+FFFD.
    """
    paths = (host_root / file.lstrip("/") for file in (VENDOR_FILE, NAME_FILE))
    vendor, name = await asyncio.gather(*map(_text, paths))
    return Machine(vendor=vendor, name=name)


async def _text(path: Path) -> str | None:
    try:
        return (await files.read(path, _LONGEST, deadline=_DEADLINE)).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("the machine's vendor and name cannot be read", file=path, reason=error)
        return None
