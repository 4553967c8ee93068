"""Notices that a directory of the kubelet was deleted under its mount.

A container goes on seeing the deleted directory after ``rm -rf /var/lib/kubelet``, or after a
kubelet was removed and installed again. Only a new container sees the one in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path

from npu_agent.ticks import until_tick


async def until_deleted(directories: Collection[Path], every: float = 5.0) -> Path:
    """Waits until one of these is a deleted directory, and returns it; looks `every` seconds.

    A path where there is nothing is none: what is made there later will be seen.
    """
    while True:
        for directory in directories:
            with contextlib.suppress(OSError):
                if not directory.stat().st_nlink:
                    return directory
        await asyncio.sleep(until_tick(every))
