"""Directories that the agent writes to; only some configurations use CDI's and those of NFD."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from npu_agent.core.trouble import TroubleKind
from npu_agent.outputs import cdi
from npu_agent.outputs.labels import nfd
from npu_agent.people.doctor.check import Check, Lines, Unknown, ok, unused, wrong
from npu_agent.people.doctor.context import Context
from npu_agent.people.doctor.offer import by_claims


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """A directory, as this process sees it."""

    path: Path
    owner: str = ""
    """``uid 0, gid 0, mode 0750``; empty where there is none."""
    there: bool = True
    readable: bool = True
    writable: bool = True
    read_only: bool = False


def directory(path: Path) -> Directory:
    """Reads what is at `path`; may block. Anything but a directory is not `there`."""
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        info = None
    if info is None or not stat.S_ISDIR(info.st_mode):
        return Directory(path=path, there=False, readable=False, writable=False)
    mode = stat.S_IMODE(info.st_mode)
    return Directory(
        path=path,
        owner=f"uid {info.st_uid}, gid {info.st_gid}, mode {mode:04o}",
        readable=os.access(path, os.R_OK | os.X_OK, effective_ids=True),
        writable=os.access(path, os.W_OK | os.X_OK, effective_ids=True),
        read_only=bool(os.statvfs(path).f_flag & os.ST_RDONLY),
    )


def existing(path: Path) -> Path:
    """The directory itself, or the one above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def writable(context: Context, found: Directory, remedy: str) -> Check:
    """Whether this process may write to a directory; raises Unknown if root may, perhaps."""
    command = f"ls -ld {context.on_the_host(found.path)}"
    if not found.there:
        return wrong(f"{found.path} is missing", remedy, command)
    if found.read_only:
        return wrong(f"{found.path} is mounted read-only", remedy, command)
    if found.writable:
        return ok(f"{found.path} ({found.owner}) can be written")
    detail = f"{found.path} ({found.owner}) may not be written by uid {context.uid}"
    if not context.in_pod and context.uid:
        raise Unknown(detail, TroubleKind.DENIED)
    return wrong(detail, remedy, command)


async def lines(context: Context) -> Lines:
    yield "CDI directory", _cdi(context)
    yield "NFD directory", _nfd(context)


async def _cdi(context: Context) -> Check:
    remedy = "let the agent write the host's /var/run/cdi: component k8s/components/"
    if await by_claims(context):
        remedy += "dra"
    elif context.config.allocation.method == "cdi":
        remedy += "cdi; or set allocation.method to deviceNodes"
    else:
        return unused("allocation.method is deviceNodes")
    path = context.host_root / cdi.DIRECTORY
    found = await context.in_thread(lambda: directory(existing(path)))
    return writable(context, found, remedy)


async def _nfd(context: Context) -> Check:
    if context.config.labels.output != "nfd":
        return unused(f"labels.output is {context.config.labels.output}")
    path = (context.host_root / nfd.FILE).parent
    return writable(
        context,
        await context.in_thread(lambda: directory(path)),
        "install Node Feature Discovery here and let the agent write its features.d "
        "(component k8s/components/nfd-output), or set labels.output to api",
    )
