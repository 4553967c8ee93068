"""Directories that the agent writes to; only some configurations use CDI's and those of NFD."""

from __future__ import annotations

from pathlib import Path

from npu_agent.core.trouble import TroubleKind
from npu_agent.doctor.check import Finding, Lines, Unseen, ok, unused, wrong
from npu_agent.doctor.host import by_claims
from npu_agent.doctor.probe import Directory, directory, probe
from npu_agent.doctor.situation import Situation
from npu_agent.outputs import cdi
from npu_agent.outputs.labels import nfd


async def lines(here: Situation) -> Lines:
    """Of this subject."""
    yield "CDI directory", _cdi(here)
    yield "NFD directory", _nfd(here)


async def _cdi(here: Situation) -> Finding:
    remedy = "let the agent write the host's /var/run/cdi: component k8s/components/"
    if await by_claims(here):
        remedy += "dra"
    elif here.config.allocation.method == "cdi":
        remedy += "cdi; or set allocation.method to deviceNodes"
    else:
        return unused("allocation.method is deviceNodes")
    place = await probe(lambda: directory(existing(here.host_root / cdi.DIRECTORY)))
    return writable(here, place, remedy)


def existing(path: Path) -> Path:
    """The directory itself, or the one in which the agent would make it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


async def _nfd(here: Situation) -> Finding:
    if here.config.labels.output != "nfd":
        return unused(f"labels.output is {here.config.labels.output}")
    path = (here.host_root / nfd.FILE).parent
    return writable(
        here,
        await probe(lambda: directory(path)),
        "install Node Feature Discovery here and let the agent write its features.d "
        "(component k8s/components/nfd-output), or set labels.output to api",
    )


def writable(here: Situation, place: Directory, remedy: str) -> Finding:
    """Whether this process may write to a directory.

    Raises:
        Unseen: root may, perhaps.
    """
    command = f"ls -ld {here.on_the_host(place.path)}"
    if not place.there:
        return wrong(f"{place.path} is missing", remedy, command)
    if place.read_only:
        return wrong(f"{place.path} is mounted read-only", remedy, command)
    if place.writable:
        return ok(f"{place.path} ({place.owner}) can be written")
    detail = f"{place.path} ({place.owner}) may not be written by uid {here.uid}"
    if not here.in_pod and here.uid:
        raise Unseen(detail, TroubleKind.DENIED)
    return wrong(detail, remedy, command)
