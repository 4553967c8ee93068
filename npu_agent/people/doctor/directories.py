"""Directories that the agent reads or writes, as this process sees them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from npu_agent.core.trouble import TroubleKind
from npu_agent.people.doctor.check import Check, Unknown, ok, wrong
from npu_agent.people.doctor.context import Context


async def usable(context: Context, path: Path, remedy: str, *, write: bool = False) -> Check:
    """Whether this process may read a directory, or write to it.

    Raises:
        Unknown: this user may not, and root may.
    """
    command = context.apply_again() if context.in_pod else f"ls -ld {path}"
    owner, fault = await context.in_thread(lambda: look(path, write=write))
    if not fault:
        return ok(f"{path} can be {'written' if write else 'read'}")
    if owner and context.uid and not context.in_pod:
        raise Unknown(f"{path} ({owner}) {fault} by uid {context.uid}", TroubleKind.DENIED)
    return wrong(f"{path} {f'({owner}) ' if owner else ''}{fault}", remedy, command)


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


def existing(path: Path) -> Path:
    """The directory itself, or the one above it that exists; may block."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
