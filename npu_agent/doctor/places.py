"""Directories that only some configurations write to: CDI's, and Node Feature Discovery's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_agent.doctor.check import Check, State, Unseen
from npu_agent.doctor.look import Directory, content, directory, look
from npu_agent.doctor.situation import Situation
from npu_agent.outputs import cdi
from npu_agent.outputs.labels import nfd

_LARGEST = 1 << 20
"""Bytes of a feature file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """All that was seen of them; None: not looked at, as the configuration does not use it."""

    cdi: Directory | Unseen | None
    nfd: Directory | Unseen | None
    features: bytes | Unseen | None
    """The content of our feature file; None where there is none."""


async def places(situation: Situation) -> Places:
    """Looks at those that the configuration uses."""
    config, root = situation.config, situation.host_root
    by_cdi, by_nfd = config.allocation.method == "cdi", config.labels.output == "nfd"
    specs, features = root / cdi.DIRECTORY, root / nfd.FILE

    async def none() -> None:
        return None

    found, other, text = await asyncio.gather(
        look(lambda: directory(_existing(specs))) if by_cdi else none(),
        look(lambda: directory(features.parent)) if by_nfd else none(),
        look(lambda: content(features, _LARGEST)) if by_nfd else none(),
    )
    return Places(cdi=found, nfd=other, features=text)


def unseen(why: Unseen) -> Places:
    """Nothing of them was seen."""
    return Places(cdi=why, nfd=why, features=why)


def _existing(path: Path) -> Path:
    """The directory itself, or the one in which the agent would make it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def checks(situation: Situation, found: Places) -> Iterator[Check]:
    """What it means."""
    yield _writable(
        "CDI directory",
        situation,
        found.cdi,
        unused="allocation.method is deviceNodes",
        remedy="let the agent write the host's /var/run/cdi (component k8s/components/cdi), or set "
        "allocation.method to deviceNodes",
    )
    yield _writable(
        "NFD directory",
        situation,
        found.nfd,
        unused=f"labels.output is {situation.config.labels.output}",
        remedy="install Node Feature Discovery here and let the agent write its features.d "
        "(component k8s/components/nfd-output), or set labels.output to api",
    )


def _writable(
    name: str, situation: Situation, found: Directory | Unseen | None, *, unused: str, remedy: str
) -> Check:
    if found is None:
        return Check(name, State.UNUSED, unused)
    if isinstance(found, Unseen):
        return found.check(name)
    if not found.there:
        return Check(name, State.WRONG, f"{found.path} is missing", remedy)
    if found.read_only:
        return Check(name, State.WRONG, f"{found.path} is mounted read-only", remedy)
    return of_writing(name, situation, found, remedy)


def of_writing(name: str, situation: Situation, found: Directory, remedy: str) -> Check:
    """Whether this process may write to a directory that is there."""
    if found.writable:
        return Check(name, State.OK, f"{found.path} ({found.owner}) can be written")
    detail = f"{found.path} ({found.owner}) may not be written by uid {situation.uid}"
    if not situation.in_pod and situation.uid:
        return Unseen(detail, denied=True).check(name)
    return Check(name, State.WRONG, detail, remedy)
