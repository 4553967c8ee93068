"""All lines of the report: the subjects, and how their lines are judged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from npu_agent.doctor import cluster, dra, host, kubelet, places, privileges, serving, sockets
from npu_agent.doctor.causes import with_causes
from npu_agent.doctor.check import CONFIGURATION, Check, Finding, Lines, Unseen, unknown
from npu_agent.doctor.kubelet import owner
from npu_agent.doctor.situation import Situation
from npu_agent.doctor.sockets import plugin_directory
from npu_agent.logs import logger

log = logger(__name__)

SUBJECTS: dict[str, Callable[[Situation], Lines]] = {
    "rights": cluster.rights,
    "privileges": privileges.lines,
    "hardware": host.lines,
    "sockets": sockets.lines,
    "kubelet": kubelet.lines,
    "directories": places.lines,
    "metrics": serving.lines,
    "cluster": cluster.lines,
    "DRA": dra.lines,
}
"""In the order in which people read them, and fix what is wrong."""

SECTIONS = {
    "rights": CONFIGURATION,
    "privileges": CONFIGURATION,
    "hardware": "Hardware",
    "sockets": "Kubelet",
    "kubelet": "Kubelet",
    "directories": "Kubelet",
    "metrics": "Metrics and readiness",
    "cluster": "Cluster",
    "DRA": "DRA",
}
"""The heading that the lines of each subject stand under."""


async def examine(situation: Situation) -> tuple[Check, ...]:
    """Every line but the one on the configuration. No subject waits for another."""
    here = replace(situation)  # with nothing seen yet
    found = await asyncio.gather(*(checks(name, lines(here)) for name, lines in SUBJECTS.items()))
    return with_causes(check for subject in found for check in subject)


async def checks(name: str, lines: Lines) -> list[Check]:
    """The lines of the subject `name`: all are judged at the same time.

    Where `lines` itself ends with Unseen, as it needs to know what lines there are, another line
    has said so. A fault of our own is a line, and no traceback; the other lines stay.
    """
    judged: list[asyncio.Task[Check]] = []
    try:
        async for each, finding in lines:
            judged.append(asyncio.create_task(_judged(name, each, finding)))
    except Unseen:
        pass
    except Exception as error:  # the edge: the other subjects go on
        judged.append(asyncio.create_task(_judged(name, name, _fault(error))))
    return [await line for line in judged]


async def _judged(subject: str, name: str, judging: Finding | Awaitable[Finding]) -> Check:
    try:
        finding = judging if isinstance(judging, Finding) else await judging
    except Unseen as unseen:
        finding = unseen.finding
    except Exception as error:  # as above
        finding = _fault(error)
    return Check(name, *finding, section=SECTIONS.get(subject, subject))


async def no_node(situation: Situation) -> bool:
    """Whether this is a host that has nothing to do with NPUs and Kubernetes, such as a laptop.

    No card, no driver for one, none on the bus, and no directory of a kubelet; all of it seen.
    """
    here = replace(situation)
    if here.in_pod:
        return False
    try:
        return not (
            (await here.see(plugin_directory)).there
            or await here.see(host.any_sign_of_cards)
            or await here.see(owner) is not None
        )
    except Unseen:
        return False


def _fault(error: Exception) -> Finding:
    log.debug("a check failed", exc_info=error)
    return unknown(f"internal error: {error!r}")
