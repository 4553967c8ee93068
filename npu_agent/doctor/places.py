"""Directories that only some configurations write to: CDI's, and Node Feature Discovery's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_agent.core.trouble import TroubleKind
from npu_agent.doctor.check import Check, Finding, Unseen, have, line, ok, unused, wrong
from npu_agent.doctor.probe import Directory, directory, probe
from npu_agent.doctor.situation import Situation
from npu_agent.files import content
from npu_agent.outputs import cdi
from npu_agent.outputs.labels import nfd

_LARGEST = 1 << 20
"""Bytes of a feature file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """All that was seen of them; None: not probed, as the configuration does not use it."""

    cdi: Directory | Unseen | None
    nfd: Directory | Unseen | None
    features: bytes | Unseen | None
    """The content of our feature file; None where there is none."""


async def places(situation: Situation) -> Places:
    """Probes those that the configuration uses."""
    config, root = situation.config, situation.host_root
    by_cdi, by_nfd = config.allocation.method == "cdi", config.labels.output == "nfd"
    features = root / nfd.FILE
    found, other, text = await asyncio.gather(
        probe(lambda: directory(_existing(root / cdi.DIRECTORY)) if by_cdi else None),
        probe(lambda: directory(features.parent) if by_nfd else None),
        probe(lambda: content(features, _LARGEST) if by_nfd else None),
    )
    return Places(cdi=found, nfd=other, features=text)


def _existing(path: Path) -> Path:
    """The directory itself, or the one in which the agent would make it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def checks(situation: Situation, found: Places) -> Iterator[Check]:
    """What it means."""
    yield line(
        "CDI directory",
        writable,
        situation,
        found.cdi,
        "let the agent write the host's /var/run/cdi (component k8s/components/cdi), or set "
        "allocation.method to deviceNodes",
        without="allocation.method is deviceNodes",
    )
    yield line(
        "NFD directory",
        writable,
        situation,
        found.nfd,
        "install Node Feature Discovery here and let the agent write its features.d "
        "(component k8s/components/nfd-output), or set labels.output to api",
        without=f"labels.output is {situation.config.labels.output}",
    )


def writable(
    situation: Situation, found: Directory | Unseen | None, remedy: str, *, without: str = ""
) -> Finding:
    """Whether this process may write to a directory; `without` says why it is not needed."""
    if found is None:
        return unused(without)
    place = have(found)
    if not place.there:
        return wrong(f"{place.path} is missing", remedy)
    if place.read_only:
        return wrong(f"{place.path} is mounted read-only", remedy)
    if place.writable:
        return ok(f"{place.path} ({place.owner}) can be written")
    detail = f"{place.path} ({place.owner}) may not be written by uid {situation.uid}"
    if not situation.in_pod and situation.uid:
        raise Unseen(detail, TroubleKind.DENIED)
    return wrong(detail, remedy)
